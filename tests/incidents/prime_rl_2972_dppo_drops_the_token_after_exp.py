"""prime-rl #2972, default RL loss with the DPPO mask - the stale token is dropped by a product, its ratio is already inf.

Rollout and trainer are some versions apart, one token has the log probability -91 at the rollout and -0.01 here. The mask on the difference of the probabilities leaves just this token out,
but exp(91) is inf and keep_mask * advantage * inf is NaN. (Source: PrimeIntellect-ai/prime-rl issue #2972, default_loss_fn.) Heals: clamping the log ratio to [-20, 20] before the exp;
torch.where(keep_mask, log_importance_ratio, 0) under the exp; a ratio indexed by keep_mask before the exp. Does not: torch.where(keep_mask, advantages * importance_ratio, 0) and importance_ratio.clamp(max=20)
(the loss is finite, the gradient 0 * inf), nan_to_num of pg_loss, clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask",),
    op=("exp",),
    index=(9,),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "mask_before_op", "clamp_input"),
    variable=("importance_ratio",),
    line=("importance_ratio = torch.exp(log_importance_ratio)",),
)

VOCAB = 10


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.lm_head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.embed(input_ids))


def selective_log_softmax(logits, index):
    return torch.gather(logits.log_softmax(-1), -1, index.unsqueeze(-1)).squeeze(-1)


def _safe_mean(values, mask):
    denom = torch.clamp_min(mask.sum(), 1)
    return values[mask].sum() / denom


def default_loss_fn(inputs, dppo_mask_high=0.2, dppo_mask_low=0.2, kl_tau=1e-3):
    trainer_logprobs = inputs.trainer_logprobs
    inference_logprobs = inputs.inference_logprobs
    advantages = inputs.advantages
    loss_mask = inputs.loss_mask

    probs_diff = torch.exp(trainer_logprobs) - torch.exp(inference_logprobs)
    dppo_invalid_mask_high = probs_diff > dppo_mask_high
    dppo_invalid_mask_low = probs_diff < -dppo_mask_low
    dppo_invalid_mask = torch.where(advantages > 0, dppo_invalid_mask_high, dppo_invalid_mask_low)
    keep_mask = loss_mask & ~dppo_invalid_mask

    log_importance_ratio = trainer_logprobs - inference_logprobs
    importance_ratio = torch.exp(log_importance_ratio)

    pg_loss = keep_mask * advantages * importance_ratio
    kl_loss = loss_mask * log_importance_ratio**2
    loss = (-pg_loss + kl_tau * kl_loss).sum()
    return loss, {"is_masked": _safe_mean(dppo_invalid_mask.float(), loss_mask)}


def build():
    torch.manual_seed(31)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.randint(0, VOCAB, (15,))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
        model.embed.weight[input_ids[9]] = 6.0 * model.lm_head.weight[input_ids[10]] / model.lm_head.weight[input_ids[10]].norm() ** 2
        inference_logprobs = selective_log_softmax(model(input_ids[:-1]), input_ids[1:]) + 0.05 * torch.randn(14)
        inference_logprobs[9] = -91.0
    loss_mask = torch.ones(14, dtype=torch.bool)
    loss_mask[:4] = False
    advantages = torch.full((14,), 0.75)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        input_ids=input_ids,
        inference_logprobs=inference_logprobs,
        loss_mask=loss_mask,
        advantages=advantages,
    )


def run(s=None):
    s = s or build()
    trainer_logprobs = selective_log_softmax(s.model(s.input_ids[:-1]), s.input_ids[1:])
    inputs = SimpleNamespace(
        trainer_logprobs=trainer_logprobs, inference_logprobs=s.inference_logprobs, advantages=s.advantages, loss_mask=s.loss_mask
    )
    loss, metrics = default_loss_fn(inputs)
    loss = loss / s.loss_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

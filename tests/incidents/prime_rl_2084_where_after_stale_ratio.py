"""prime-rl, IPO policy loss of a packed row with a stale rollout token, the repaired form with torch.where.

The rollout engine served an old adapter, so one sampled token has an inference log-prob near -100 while the trainer gives it a good probability: exp of the
log ratio is inf. The IPO band rejects this token, and the PR replaces `keep_mask * advantages * ratio` by torch.where, which makes the loss finite; the derivative
of the exp is still 0 * inf. (Source: PrimeIntellect-ai/prime-rl, pull request 2084, src/prime_rl/trainer/rl/loss.py.)
Heals: where on the log ratio before the exp; clamping the log ratio at 20; where on the detached ratio as a weight of the log-prob. Does not: nan_to_num or clamp on the ratio after the exp; clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "exp_overflow"),
    op=("exp",),
    index=(6,),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "where_on_detached", "clamp_input"),
    variable=("importance_ratio",),
    line=("importance_ratio = torch.exp(log_importance_ratio)",),
)

CONFIG = SimpleNamespace(ipo_mask_low=0.2, ipo_mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)


class Trainer(nn.Module):
    def __init__(self, vocab=16, dim=24):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.up = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        return self.lm_head(hidden + torch.tanh(self.up(hidden)))


def selective_log_softmax(logits, index):
    logprobs = logits.log_softmax(dim=-1)
    return torch.gather(logprobs, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)


def compute_loss(trainer_logprobs, inference_logprobs, advantages, loss_mask, loss_config, loss_scale):
    total_loss = 0
    for trainer_lp, inference_lp, adv, mask in zip(trainer_logprobs, inference_logprobs, advantages, loss_mask):
        log_importance_ratio = trainer_lp - inference_lp
        importance_ratio = torch.exp(log_importance_ratio)

        probs_diff = torch.exp(trainer_lp) - torch.exp(inference_lp)
        is_masked = (probs_diff > loss_config.ipo_mask_high) | (probs_diff < -loss_config.ipo_mask_low)
        keep_mask = mask & ~is_masked

        scaled = loss_config.adv_tau * adv
        pg_loss = torch.where(keep_mask, scaled * importance_ratio, torch.zeros_like(scaled))
        kl_loss = mask * log_importance_ratio**2
        total_loss = total_loss + (-pg_loss + loss_config.kl_tau * kl_loss).sum()
    return total_loss / loss_scale


def build():
    torch.manual_seed(7)
    model = Trainer()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    input_ids = torch.randint(0, 16, (1, 20))
    with torch.no_grad():
        logits = model(input_ids)
        targets = torch.distributions.Categorical(logits=logits).sample()
        targets[0, 6] = logits[0, 6].argmax()
        rollout = selective_log_softmax(logits, targets) + 0.02 * torch.randn(1, 20)
        rollout[0, 6] = -101.5
    loss_mask = torch.ones(1, 20, dtype=torch.bool)
    loss_mask[0, :2] = False
    loss_mask[0, 11:13] = False
    advantages = torch.cat([torch.full((11,), 0.75), torch.full((9,), -0.75)]).unsqueeze(0)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        input_ids=input_ids,
        targets=targets,
        inference_logprobs=rollout,
        advantages=advantages,
        loss_mask=loss_mask,
        seq_lens=[11, 9],
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids)
    trainer_logprobs = selective_log_softmax(logits, s.targets)
    loss = compute_loss(
        trainer_logprobs.squeeze(0).split(s.seq_lens),
        s.inference_logprobs.squeeze(0).split(s.seq_lens),
        s.advantages.squeeze(0).split(s.seq_lens),
        s.loss_mask.squeeze(0).split(s.seq_lens),
        CONFIG,
        loss_scale=s.loss_mask.sum(),
    )
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""TRL #7120 - AsyncGRPO importance-sampling gate in `sequence_truncate` mode.

The gate is clamp(rho) / rho, and in the sequence modes rho is the product of the token ratios of a whole completion. One completion
of 300 tokens was sampled under top-p with a kept mass of 0.7, so its product is 0.7 ** 300: zero in float32, and 0.8 / 0 is an
infinite weight on each of its tokens. Source: https://github.com/huggingface/trl/pull/7120 (review of 2026-09-09).
A floor under rho, a floor under the summed log ratio, or multiplying by clamp(rho) without the division heals; clamping the gate's
numerator harder or masking the *token* ratios does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(1, 0),
    masked=False,
    role=("is_weight", "ratio"),
    fix=("clamp_denominator", "clamp_exponent", "avoid_singular_op", "drop_invalid_sample", "fix_upstream"),
    variable=("gate", "weight"),
    line=("gate = rho.clamp(clip_min, clip_max) / rho",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=24, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def per_token_logps(model, input_ids):
    logits = model(input_ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def sequence_gate(log_ratio, completion_mask, clip_min=0.8, clip_max=3.0):
    seq_log_ratio = (log_ratio * completion_mask).sum(-1, keepdim=True)
    rho = seq_log_ratio.exp()
    gate = rho.clamp(clip_min, clip_max) / rho
    return gate


def build():
    torch.manual_seed(7120)
    model = TinyLM()
    input_ids = torch.randint(0, 24, (3, 301))
    completion_mask = torch.ones(3, 300)
    completion_mask[0, 40:] = 0
    completion_mask[2, 25:] = 0
    with torch.no_grad():
        trained = per_token_logps(model, input_ids)
    drift = 0.002 * torch.randn(3, 300)
    sampling_logps = trained + drift
    sampling_logps[1] -= torch.log(torch.tensor(0.7))  # processed_logprobs: renormalised over the nucleus
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        input_ids=input_ids,
        completion_mask=completion_mask,
        sampling_logps=sampling_logps,
        advantages=torch.tensor([-0.7, 1.1, 0.4]),
    )


def run(s=None):
    s = s or build()
    logps = per_token_logps(s.model, s.input_ids)
    log_ratio = logps - s.sampling_logps
    coef = log_ratio.exp()
    adv = s.advantages.unsqueeze(1)
    per_token_loss = -torch.min(coef * adv, coef.clamp(0.8, 1.2) * adv)
    weight = sequence_gate(log_ratio.detach(), s.completion_mask)
    per_token_loss = per_token_loss * weight
    loss = (per_token_loss * s.completion_mask).sum() / s.completion_mask.sum().clamp(min=1)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

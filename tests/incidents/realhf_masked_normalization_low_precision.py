"""ReaLHF / AReaL masked_normalization with high_precision=False: E[x^2] - E[x]^2 in fp32 of returns that are all near 250 is negative.

Source: https://github.com/openpsi-project/ReaLHF (realhf/impl/model/utils/functional.py, masked_normalization). Every answer got about the same large
reward, the two moments differ by less than one fp32 ulp of 62500, the variance comes out below 0 and its sqrt is NaN.
Heals: moments in float64 (high_precision=True), the mean of squared deviations, a variance clamped at 0. Tempting and useless: a larger eps
(it is added after the sqrt), unbiased=True (scales the negative number).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(0, 0),
    masked=None,
    role=("advantages", "rewards"),
    fix=("clamp_input", "stable_function", "upcast_fp32", "clamp_denominator", "guard_small_group", "fix_upstream"),
    variable=("std", None),
    line=("std = var.sqrt()",),
)


class Actor(nn.Module):
    def __init__(self, vocab=20, dim=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.head(self.ln(self.embedding(ids)))


@torch.no_grad()
def masked_normalization(x, mask=None, dim=None, unbiased=False, eps=1e-5, high_precision=True):
    dtype = torch.float64 if high_precision else torch.float32
    x = x.to(dtype)
    if dim is None:
        dim = tuple(range(len(x.shape)))
    if mask is None:
        factor = torch.tensor(float(x.numel()), dtype=dtype)
    else:
        mask = mask.to(dtype)
        x = x * mask
        factor = mask.sum(dim, keepdim=True)
    x_sum = x.sum(dim=dim, keepdim=True)
    x_sum_sq = x.square().sum(dim=dim, keepdim=True)
    mean = x_sum / factor
    meansq = x_sum_sq / factor
    var = meansq - mean**2
    if unbiased:
        var = var * factor / (factor - 1)
    std = var.sqrt()
    return ((x - mean) / (std + eps)).float()


def actor_loss(logprobs, old_logprobs, advantages, loss_mask, eps_clip=0.2):
    ratio = torch.where(loss_mask, torch.exp(logprobs - old_logprobs), 0)
    clipped = torch.clamp(ratio, 1 - eps_clip, 1 + eps_clip)
    pg = torch.max(-advantages * ratio, -advantages * clipped)
    return torch.where(loss_mask, pg, 0).sum() / loss_mask.count_nonzero()


def build():
    torch.manual_seed(13)
    model = Actor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(0, 20, (6, 11))
    loss_mask = torch.ones(6, 10, dtype=torch.bool)
    loss_mask[:, :3] = False
    loss_mask[4, 8:] = False
    rewards = 250.1 + 1e-3 * torch.rand(6, 1)  # scaled by 25, no baseline; every answer passes
    returns = rewards.expand(6, 10).clone()
    with torch.no_grad():
        old = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return SimpleNamespace(
        model=model, optimizer=optimizer, ids=ids, loss_mask=loss_mask, returns=returns, old_logprobs=old, high_precision=False
    )


def run(s=None):
    s = s or build()
    advantages = masked_normalization(s.returns, s.loss_mask, high_precision=s.high_precision)
    logprobs = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    loss = actor_loss(logprobs, s.old_logprobs, advantages, s.loss_mask)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

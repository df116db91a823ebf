"""Sampler/trainer mismatch weight per sequence is exp of the summed log difference, so a long completion overflows it."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(2, 0),
    masked=False,
    role=("is_weight", "ratio"),
    fix=("clamp_exponent",),
    variable=("mismatch_weight",),
    line=("mismatch_weight = torch.exp(sequence_difference)",),
)


def token_logps(model, ids):
    scores = model(ids[:, :-1])
    picked = scores.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return picked - scores.logsumexp(dim=-1)


def mismatch_correction(old_logps, sampler_logps, keep):
    difference = torch.where(keep, old_logps - sampler_logps, 0.0)
    sequence_difference = difference.sum(dim=-1, keepdim=True)
    mismatch_weight = torch.exp(sequence_difference)
    return mismatch_weight


def policy_loss(logps, old_logps, sampler_logps, advantages, keep, clip=0.2):
    coef = torch.exp(logps - old_logps)
    adv = advantages[:, None]
    surrogate = torch.minimum(coef * adv, coef.clamp(1 - clip, 1 + clip) * adv)
    per_token = -surrogate * mismatch_correction(old_logps, sampler_logps, keep)
    lengths = keep.sum(dim=1)
    return torch.stack([row[m].sum() / n for row, m, n in zip(per_token, keep, lengths)]).mean()


def build():
    torch.manual_seed(5814)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12))
    ids = torch.randint(0, 12, (4, 49))
    keep = torch.arange(48)[None, :] < torch.tensor([20, 31, 48, 9])[:, None]
    with torch.no_grad():
        old_logps = token_logps(model, ids)
    sampler_logps = old_logps - 0.02 * torch.rand(4, 48)
    sampler_logps[2] -= 2.1  # this completion was drawn by workers that still held last week's adapter
    batch = {"ids": ids, "keep": keep, "old": old_logps, "sampler": sampler_logps, "adv": torch.tensor([0.4, -1.1, 0.9, -0.2])}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    loss = policy_loss(token_logps(s.model, b["ids"]), b["old"], b["sampler"], b["adv"], b["keep"])
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss

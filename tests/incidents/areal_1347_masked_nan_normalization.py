"""Advantage normalisation multiplies by the loss mask, so a NaN in a masked slot spreads through the batch mean into every advantage.
https://github.com/areal-project/AReaL/pull/1347
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("nan_times_zero_mask", "bad_input"),
    op=("mul", "_to_copy"),
    index=(2, 4),
    masked=True,
    role=("advantages",),
    fix=("mask_before_op", "reject_input", "drop_invalid_sample"),
    variable=("advantages", "x"),
    line=("x = x.double()",),
)


class Normalization:
    def __init__(self, eps=1e-5):
        self.eps = eps

    def __call__(self, x, loss_mask):
        x = x.double()
        mask = loss_mask.double()
        factor = mask.sum()
        mean = (x * mask).sum() / factor
        centred = (x - mean) * mask
        var = centred.square().sum() / factor
        return (centred / (var.sqrt() + self.eps)).float()


def ppo_actor_loss_fn(logprobs, old_logprobs, advantages, eps_clip, loss_mask):
    loss_mask_count = loss_mask.count_nonzero() or 1
    ratio = torch.where(loss_mask, torch.exp(logprobs - old_logprobs), 0)
    clipped_ratio = torch.clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio)
    return torch.where(loss_mask, pg_loss, 0).sum() / loss_mask_count


def build():
    torch.manual_seed(1347)
    model = nn.Sequential(nn.Embedding(14, 8), nn.Tanh(), nn.Linear(8, 14))
    input_ids = torch.randint(0, 14, (4, 7))
    loss_mask = torch.ones(4, 6, dtype=torch.bool)
    loss_mask[:, 0] = False
    loss_mask[2, 4:] = False
    advantages = torch.randn(4, 6)
    advantages[2, 4] = float("nan")  # rejected tool turn
    batch = {"input_ids": input_ids, "loss_mask": loss_mask, "advantages": advantages}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, adv_norm=Normalization())


def run(s=None):
    s = s or build()
    b = s.batch
    ids = b["input_ids"]
    advantages = s.adv_norm(b["advantages"], b["loss_mask"])
    logprobs = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = ppo_actor_loss_fn(logprobs, logprobs.detach(), advantages, 0.2, b["loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

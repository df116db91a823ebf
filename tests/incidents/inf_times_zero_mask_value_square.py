"""Unfinished episodes are padded with a 1e25 sentinel return; squaring the value error overflows there and the mask
multiplies inf by zero."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "magnitude_overflow"),
    op=("pow",),
    index=(0, 4),
    masked=True,
    role=("loss",),
    fix=("mask_before_op", "clamp_input"),
    variable=("err_a",),
    line=("err_a = (values - returns) ** 2",),
)

UNKNOWN = 1e25


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 9, batch_first=True)
        self.value_head = nn.Linear(9, 1)

    def forward(self, feats):
        return self.value_head(self.gru(feats)[0]).squeeze(-1)


def clipped_value_loss(values, old_values, returns, mask, cliprange=0.2):
    bounded = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    err_a = (values - returns) ** 2
    err_b = (bounded - returns) ** 2
    worst = torch.max(err_a, err_b)
    return 0.5 * torch.sum(worst * mask) / mask.sum()


def build():
    torch.manual_seed(19)
    model = Critic()
    feats = torch.randn(3, 6, 3)
    mask = torch.ones(3, 6)
    mask[0, 4:] = 0
    mask[2, 5] = 0
    with torch.no_grad():
        old_values = model(feats)
    returns = (old_values + 0.3 * torch.randn(3, 6)).masked_fill(mask == 0, UNKNOWN)
    batch = dict(feats=feats, mask=mask, old_values=old_values, returns=returns)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=5e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    loss = clipped_value_loss(s.model(b["feats"]), b["old_values"], b["returns"], b["mask"])
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

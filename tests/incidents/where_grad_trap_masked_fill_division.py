"""Attention pooling divides by the pooled weight and fills the empty spans with 0 afterwards; the division by 0 still
poisons the gradient."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "zero_div_zero"),
    op=("div",),
    index=(1, 2, 0),
    masked=True,
    role=("hidden",),
    fix=("clamp_denominator",),
    variable=("pooled",),
    line=("pooled = torch.bmm(weight, h) / mass",),
)


class SpanRewardModel(nn.Module):
    def __init__(self, dim=5):
        super().__init__()
        self.feature = nn.Linear(dim, dim)
        self.importance = nn.Linear(dim, 1)
        self.head = nn.Linear(dim, 1)

    def pool(self, h, span):
        weight = torch.sigmoid(self.importance(h)).transpose(1, 2) * span  # [B, S, T]
        mass = weight.sum(dim=-1, keepdim=True)
        pooled = torch.bmm(weight, h) / mass
        return pooled.masked_fill(mass == 0, 0.0)

    def forward(self, x, span):
        return self.head(self.pool(torch.tanh(self.feature(x)), span)).squeeze(-1)


def build():
    torch.manual_seed(1234)
    model = SpanRewardModel()
    span = torch.zeros(2, 3, 8)
    for b, s, lo, hi in [(0, 0, 0, 3), (0, 1, 3, 5), (0, 2, 5, 8), (1, 0, 0, 4), (1, 1, 4, 7)]:
        span[b, s, lo:hi] = 1.0
    labels = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    batch = dict(x=torch.randn(2, 8, 5), span=span, labels=labels)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch=batch)


def run(s=None):
    s = s or build()
    score = s.model(s.batch["x"], span=s.batch["span"])
    loss = nn.functional.binary_cross_entropy_with_logits(score, s.batch["labels"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

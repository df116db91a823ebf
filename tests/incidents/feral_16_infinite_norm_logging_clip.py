"""Gradients are huge but finite; clipping with max_norm=inf only to log the norm divides inf by inf and turns every gradient into NaN.
https://github.com/Skovorp/feral/pull/16
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer", "backward"),
    cause=("inf_grad_norm_clip", "magnitude_overflow"),
    op=("linalg_vector_norm", "_foreach_norm", "norm", "mul", "div", "reciprocal"),
    index=None,
    masked=None,
    role=("grad",),
    fix=("skip_bad_step", "fix_upstream"),
    variable=("grad_norm",),
    line=('grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=float("inf"))',),
)


class Head(nn.Module):
    def __init__(self, dim=6, classes=4):
        super().__init__()
        self.pool = nn.Linear(dim, dim)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x):
        return self.fc(torch.tanh(self.pool(x)))


def train_one_epoch(model, loader, criterion, optimizer, grad_clip_norm=None, log_grad_norm=True):
    losses, norms = [], []
    for data, target, weight in loader:
        output = model(data)
        loss = (criterion(output, target) * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        if grad_clip_norm is not None:
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=grad_clip_norm)
        elif log_grad_norm:
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=float("inf"))
        norms.append(grad_norm)
        optimizer.step()
        losses.append(loss.detach())
    return losses[-1], norms


def build():
    torch.manual_seed(16)
    model = Head()
    loader = [(torch.randn(5, 6), torch.randint(0, 4, (5,)), torch.ones(5)) for _ in range(3)]
    loader[2][2][1] = 3.0e25  # inverse frequency of a behaviour that was never counted
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=loader, criterion=nn.CrossEntropyLoss(reduction="none"))


def run(s=None):
    s = s or build()
    loss, s.norms = train_one_epoch(s.model, s.batch, s.criterion, s.optimizer)
    return loss

"""Hand-written clipping squares float16 gradients in float16: every gradient is finite, the norm is inf, and the
coefficient erases the update.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "optimizer"),
    cause=("inf_grad_norm_clip", "fp16_overflow"),
    op=("mul", "pow", "square", "sum"),
    index=(6, 2),
    masked=None,
    role=("grad",),
    fix=("upcast_fp32", "skip_bad_step", "clamp_input"),
    variable=("squares",),
    line=("squares = p.grad * p.grad",),
)


def clip_by_total_norm(params, limit):
    total = 0.0
    for p in params:
        squares = p.grad * p.grad
        total = total + squares.sum()
    norm = total**0.5
    for p in params:
        p.grad.mul_(limit / torch.clamp(norm, min=limit))
    return norm


class Scorer(nn.Module):
    def __init__(self, width=6, classes=9):
        super().__init__()
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        return self.out(torch.tanh(self.mid(x)))


def build():
    torch.manual_seed(130)
    model = Scorer().half()
    features = 0.3 * torch.randn(4, 6).half()
    with torch.no_grad():
        model.mid.weight[2] = 0.0
        model.mid.bias.copy_(torch.tensor([0.05, -0.02, 1.6, 0.04, -0.05, 0.01]))
    chosen = torch.tensor([6, 6, 6, 6])
    weight = torch.tensor([420.0, 380.0, 400.0, 410.0]).half()  # unnormalised token counts used as weights
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=(features, chosen, weight))


def run(s=None):
    s = s or build()
    features, chosen, weight = s.batch
    logp = s.model(features).log_softmax(-1)
    loss = -(weight * logp[torch.arange(4), chosen]).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.grad_norm = clip_by_total_norm(list(s.model.parameters()), limit=1.0)
    s.optimizer.step()
    return loss

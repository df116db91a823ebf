"""Attention in float16 whose keys carry a large outlier: scores are scaled before the product, and stay small; the gradient of the
queries is the gradient of the scores times the keys, and overflows.

Heals: scores in float32, a smaller loss scale. Does not: a clamp of the scores (they are small).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow",),
    op=("bmm", "mm", "matmul"),
    index=None,
    masked=None,
    role=("hidden", "grad", "weights"),
    fix=("upcast_fp32", "validate_config"),
    variable=("scores",),
    line=("scores = torch.bmm(q, k.transpose(1, 2))",),
)


class Attention(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.dim = dim
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, 1, bias=False)

    def forward(self, x):
        q = F.linear(x, self.query.weight.half()) * self.dim**-0.5
        k = F.linear(x, self.key.weight.half())
        scores = torch.bmm(q, k.transpose(1, 2))
        weights = scores.float().softmax(-1).half()
        return (weights @ F.linear(x, self.value.weight.half())).squeeze(-1)


def build():
    torch.manual_seed(8)
    model = Attention()
    with torch.no_grad():
        model.query.weight.mul_(0.001)
        model.key.weight[5] = 400.0
        model.value.weight.mul_(6.0)
    x = torch.randn(2, 6, 8).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, target=torch.full((2, 6), 60.0), loss_scale=2.0**8)


def run(s=None):
    s = s or build()
    logits = s.model(s.x)
    loss = F.mse_loss(logits.float(), s.target)
    s.optimizer.zero_grad()
    (loss * s.loss_scale).backward()
    for p in s.model.parameters():
        if p.grad is not None:
            p.grad.div_(s.loss_scale)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

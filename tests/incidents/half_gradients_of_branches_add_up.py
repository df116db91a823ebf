"""A float16 block whose two branches read the same tensor: each of them hands back a gradient of some 4e4, which fits, and their sum does not.

Heals: the branches in float32, a smaller loss scale.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow",),
    op=("mul",),
    index=(0, 0),
    masked=None,
    role=("hidden", "grad", "weights"),
    fix=("upcast_fp32", "validate_config"),
    variable=("hidden",),
    line=("hidden = x * self.gain.half()",),
)


class Branches(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.register_buffer("left", torch.full((dim,), 10.0))
        self.register_buffer("right", torch.full((dim,), 9.0))

    def forward(self, x):
        hidden = x * self.gain.half()
        left = hidden * self.left.half()
        right = hidden * self.right.half()
        return (left + right).float().sum(-1)


def build():
    torch.manual_seed(23)
    model = Branches()
    x = torch.rand(3, 4).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, target=torch.full((3,), -120.0), loss_scale=40.0)


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

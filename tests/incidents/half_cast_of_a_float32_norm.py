"""A norm that computes in float32 on float16 input, with rows next to 0: the gradient of its input is the incoming one divided by the
root mean square, fits float32, and does not fit the float16 that it is cast back to.

Heals: the residual stream in float32, a larger eps. Does not: the norm in float32 (it is).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow",),
    op=("_to_copy", "to_copy"),
    index=None,
    masked=None,
    role=("hidden", "grad", "weights"),
    fix=("upcast_fp32", "validate_config"),
    variable=("wide", "x", None),
    line=("wide = x.float()",),
)


class Normed(nn.Module):
    def __init__(self, dim=4, eps=1e-12):
        super().__init__()
        self.up = nn.Linear(dim, dim, bias=False)
        self.eps = eps

    def forward(self, x):
        x = F.linear(x, self.up.weight.half())
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * torch.tensor([1.0, 2.0, -1.0, 0.5])).sum(-1)


def build():
    torch.manual_seed(29)
    model = Normed()
    x = torch.randn(5, 4)
    x[2] *= 2e-5
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x.half(), target=torch.full((5,), -3.0), loss_scale=1.0)


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

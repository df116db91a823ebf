"""A squared ReLU in float16 (Primer, nanochat): an activation of 200 squared is 40000 and fits, its derivative 400 times the incoming
gradient does not.

Heals: the square in float32, a smaller loss scale. Does not: a clamp of the result (it is in range).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow",),
    op=("pow", "square"),
    index=(1, 2),
    masked=None,
    role=("hidden", "grad", "weights"),
    fix=("upcast_fp32", "validate_config"),
    variable=(None,),
    line=("return F.linear(F.relu(hidden).square(), self.proj.weight.half()).squeeze(-1)",),
)


class SquaredMLP(nn.Module):
    def __init__(self, dim=8, hidden=12):
        super().__init__()
        self.fc = nn.Linear(dim, hidden, bias=False)
        self.proj = nn.Linear(hidden, 1, bias=False)

    def forward(self, x):
        hidden = F.linear(x, self.fc.weight.half())
        return F.linear(F.relu(hidden).square(), self.proj.weight.half()).squeeze(-1)


def build():
    torch.manual_seed(5)
    model = SquaredMLP()
    x = torch.rand(4, 8)
    with torch.no_grad():
        model.fc.weight.mul_(0.5)
        model.proj.weight.mul_(0.01)
        model.fc.weight[2] = 0.0
        model.fc.weight[2, 0] = 200.0
        model.proj.weight[:, 2] = 0.01
        x[:, 0] = 0.001
        x[1, 0] = 1.0
    model.proj.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x.half(), target=torch.zeros(4), loss_scale=2.0**8)


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

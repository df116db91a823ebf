"""Weights and compute in float16: the gradient of a weight is a sum over 4096 tokens of products that are each small, and the sum is beyond
65504.

Heals: float32 master weights and their gradient in float32, a smaller loss scale.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow",),
    op=("mm", "addmm", "linear", "t"),
    index=None,
    masked=None,
    role=("hidden", "grad", "weights"),
    fix=("upcast_fp32", "validate_config"),
    variable=("hidden", None),
    line=("hidden = self.fc(x)",),
)


class Probe(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.fc = nn.Linear(dim, dim, bias=False, dtype=torch.float16)

    def forward(self, x):
        hidden = self.fc(x)
        return hidden.float().mean(-1)


def build():
    torch.manual_seed(17)
    model = Probe()
    x = (1.0 + 0.1 * torch.randn(4096, 4)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, target=torch.full((4096,), 5.0), loss_scale=2.0**16)


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

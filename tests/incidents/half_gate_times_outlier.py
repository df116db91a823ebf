"""A gated MLP in float16: the gradient of the gate is the gradient of the product times `up`, and one channel of `up` is large. Every
activation is far below 65504, the loss is finite, and that one gradient is not.

Heals: the product in float32 with its gate, or a smaller loss scale. Does not: a clamp of the loss, clipping the gradient norm.
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
    index=(0, 3),
    masked=None,
    role=("hidden", "grad", "weights"),
    fix=("upcast_fp32", "validate_config"),
    variable=("hidden",),
    line=("hidden = F.silu(gate) * up",),
)


class GatedMLP(nn.Module):
    """float32 weights, float16 compute."""

    def __init__(self, dim=8, hidden=16):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, 1, bias=False)

    def forward(self, x):
        gate = F.linear(x, self.gate_proj.weight.half())
        up = F.linear(x, self.up_proj.weight.half())
        hidden = F.silu(gate) * up
        return F.linear(hidden, self.down_proj.weight.half()).squeeze(-1)


def build():
    torch.manual_seed(31)
    model = GatedMLP()
    with torch.no_grad():
        model.up_proj.weight[3] = 150.0  # one outlier channel of up
        model.gate_proj.weight[3] = -0.05
        model.down_proj.weight[:, 3] = 0.1
    x = torch.rand(6, 8).half()
    model.down_proj.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, target=torch.full((6,), -40.0), loss_scale=2.0**10)


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

"""The gated MLP whose gradient overflows in float16, in bfloat16: large gradients, and all of them finite."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedMLP(nn.Module):
    """float32 weights, bfloat16 compute."""

    def __init__(self, dim=8, hidden=16):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, 1, bias=False)

    def forward(self, x):
        gate = F.linear(x, self.gate_proj.weight.bfloat16())
        up = F.linear(x, self.up_proj.weight.bfloat16())
        hidden = F.silu(gate) * up
        return F.linear(hidden, self.down_proj.weight.bfloat16()).squeeze(-1)


def build():
    torch.manual_seed(31)
    model = GatedMLP()
    with torch.no_grad():
        model.up_proj.weight[3] = 150.0  # one outlier channel of up
        model.gate_proj.weight[3] = -0.05
        model.down_proj.weight[:, 3] = 0.1
    x = torch.rand(6, 8).bfloat16()
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

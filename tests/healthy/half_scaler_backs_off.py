"""float16 with a GradScaler that begins at 65536: the first gradients overflow, the scaler skips these steps and halves its scale, and training
goes on as it should.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


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
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, target=torch.full((6,), -40.0), loss_scale=None)


def run(s=None):
    s = s or build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for _ in range(14):
        loss = F.mse_loss(s.model(s.x).float(), s.target) * 0.1
        s.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(s.optimizer)
        scaler.update()
    return loss


if __name__ == "__main__":
    run()

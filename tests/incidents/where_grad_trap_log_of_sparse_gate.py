"""The gate entropy guards log(0) with torch.where, which repairs the forward value only; backward still forms 0 * (1 /
0) for closed gates."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "log_zero", "plogp_zero"),
    op=("log",),
    index=(0, 2),
    masked=True,
    role=("router", "entropy"),
    fix=("mask_before_op", "clamp_input"),
    variable=(None,),
    line=("terms = torch.where(g > 0, g * torch.log(g), torch.zeros_like(g))",),
)


class SparseGate(nn.Module):
    def __init__(self, dim=8, experts=4):
        super().__init__()
        self.w = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, h):
        g = torch.relu(self.w(h)) + torch.nn.functional.one_hot(self.w(h).argmax(-1), 4) * 0.1
        g = g / g.sum(-1, keepdim=True)
        mixed = torch.stack([e(h) for e in self.experts], dim=-2)
        return (g.unsqueeze(-1) * mixed).sum(-2), g


def gate_entropy(g):
    terms = torch.where(g > 0, g * torch.log(g), torch.zeros_like(g))
    return -terms.sum(-1)


def build():
    torch.manual_seed(6)
    model = SparseGate()
    with torch.no_grad():
        model.w.bias.copy_(torch.tensor([2.0, 1.5, -3.0, 0.2]))
    h = torch.randn(6, 8)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch={"h": h, "y": torch.randn(6, 8)})


def run(s=None):
    s = s or build()
    out, g = s.model(s.batch["h"])
    loss = nn.functional.mse_loss(out, s.batch["y"]) - 0.01 * gate_entropy(g).mean()
    loss.backward()
    s.optimizer.step()
    return loss

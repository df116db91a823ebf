"""Expert capacity drops both choices of one token, so renormalising its kept gate weights divides 0 by 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(5, 0),
    masked=False,
    role=("router",),
    fix=("clamp_denominator",),
    variable=("gates",),
    line=("gates = kept_probs / kept_probs.sum(dim=-1, keepdim=True)",),
)


def capacity_mask(choice, experts, capacity):
    hot = nn.functional.one_hot(choice, experts).sum(1)  # [tokens, experts]
    position = hot.cumsum(0) * hot
    return (hot * (position <= capacity)).float()


class CapacityMoE(nn.Module):
    def __init__(self, dim=4, experts=3, top_k=2, capacity=3):
        super().__init__()
        self.top_k, self.capacity, self.n = top_k, capacity, experts
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 8), nn.SiLU(), nn.Linear(8, dim)) for _ in range(experts))

    def forward(self, h):
        probs = self.router(h).softmax(dim=-1)
        kept = capacity_mask(probs.topk(self.top_k, dim=-1).indices, self.n, self.capacity)
        kept_probs = probs * kept
        gates = kept_probs / kept_probs.sum(dim=-1, keepdim=True)
        out = h.clone()
        for e, expert in enumerate(self.experts):
            out += gates[:, e : e + 1] * expert(h)
        return out


def build():
    torch.manual_seed(0)
    model = CapacityMoE()
    with torch.no_grad():
        model.router.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]]))
    first, second, third = [2.0, 1.0, 0.0, 0.3], [0.0, 2.0, 1.0, -0.2], [1.0, 0.0, 2.0, 0.1]
    h = torch.tensor([first, second, first, third, third, first, second])
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=dict(h=h, y=torch.randn(7, 4)))


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = nn.functional.mse_loss(s.model(s.batch["h"]), s.batch["y"])
    loss.backward()
    s.optimizer.step()
    return loss

"""The balance term is the negative entropy of the mean gate per expert; one expert is never selected, so its load is 0
and 0 * log 0 is NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "log_zero"),
    op=("log", "mul"),
    index=(3,),
    masked=False,
    role=("router", "entropy"),
    fix=("stable_function", "clamp_input"),
    variable=(None,),
    line=("return (load * load.log()).sum()",),
)


class TopKRouter(nn.Module):
    def __init__(self, dim=6, experts=5, k=2):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(dim, experts)

    def forward(self, h):
        probs = self.gate(h).softmax(-1)
        keep = torch.zeros_like(probs)
        keep.scatter_(-1, probs.topk(self.k, dim=-1).indices, 1.0)
        gates = probs * keep
        return gates / gates.sum(-1, keepdim=True)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = TopKRouter()
        self.w = nn.Parameter(torch.randn(5, 6, 6) * 0.2)

    def forward(self, h):
        g = self.router(h)
        return torch.einsum("te,eij,tj->ti", g, self.w, h), g


def imbalance(g):
    load = g.mean(0)
    return (load * load.log()).sum()


def build():
    torch.manual_seed(70)
    model = MoE()
    with torch.no_grad():
        model.router.gate.bias[3] = -20.0
        model.router.gate.weight[3] = 0.0
    h = torch.randn(24, 6)
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=(h, torch.randn(24, 6)))


def run(s=None):
    s = s or build()
    h, target = s.batch
    out, g = s.model(h)
    loss = (out - target).square().mean() + 0.02 * imbalance(g)
    loss.backward()
    s.optimizer.step()
    return loss

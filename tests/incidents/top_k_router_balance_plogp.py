"""The router keeps two experts per token and zeroes the rest; its entropy bonus multiplies those zeros by log 0 inside an einsum."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "log_zero"),
    op=("log",),
    index=(0, 0, 1),
    masked=False,
    role=("router", "entropy"),
    fix=("stable_function", "clamp_input", "mask_before_op"),
    variable=("log_gate",),
    line=("log_gate = gate.log()",),
)


class Router(nn.Module):
    def __init__(self, width=7, experts=5, k=2):
        super().__init__()
        self.k = k
        self.to_expert = nn.Linear(width, experts, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) * 0.3)

    def forward(self, x):
        prob = self.to_expert(x).softmax(-1)
        chosen = prob.topk(self.k, dim=-1).indices
        kept = prob * torch.zeros_like(prob).scatter(-1, chosen, 1.0)
        gate = kept / kept.sum(-1, keepdim=True)
        return torch.einsum("bte,btw,ewv->btv", gate, x, self.experts), gate


def gate_entropy(gate):
    log_gate = gate.log()
    return -torch.einsum("bte,bte->bt", gate, log_gate)


def build():
    torch.manual_seed(331)
    router = Router()
    batch = {"x": torch.randn(2, 6, 7), "target": torch.randn(2, 6, 7), "weight": torch.rand(2, 6)}
    return SimpleNamespace(model=router, optimizer=torch.optim.AdamW(router.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    mixed, gate = s.model(s.batch["x"])
    error = (mixed - s.batch["target"]).square().mean(-1)
    loss = (error * s.batch["weight"]).mean() - 0.01 * gate_entropy(gate).mean()
    loss.backward()
    s.optimizer.step()
    return loss

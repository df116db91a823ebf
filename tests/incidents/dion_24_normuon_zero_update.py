"""NorMuon rescales by the ratio of two norms; behind a zero-initialised output projection the gradient is exactly 0 and the ratio is 0/0.
https://github.com/microsoft/dion/pull/24
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer",),
    fix=("clamp_denominator", "representable_eps"),
    variable=("ratio",),
    line=("ratio = norm_U / norm_U_new",),
)


def newton_schulz(G, steps=3):
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G / (G.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def normuon_normalization(U, V, muon_beta2=0.95):
    neuron_norms = U.square().mean(dim=-1, keepdim=True)
    V.lerp_(neuron_norms, 1 - muon_beta2)
    denom = V.sqrt() + 1e-8
    norm_U = U.norm(p=2, dim=(-2, -1), keepdim=True)
    U = U / denom
    norm_U_new = U.norm(p=2, dim=(-2, -1), keepdim=True)
    ratio = norm_U / norm_U_new
    return U * ratio


class NorMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, mu=0.95):
        super().__init__(params, dict(lr=lr, mu=mu))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["variance_neuron"] = torch.zeros_like(p[:, :1])
                state["momentum"].mul_(group["mu"]).add_(p.grad)
                U = newton_schulz(state["momentum"])
                p.add_(normuon_normalization(U, state["variance_neuron"]), alpha=-group["lr"])


class MLP(nn.Module):
    def __init__(self, vocab=12, dim=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim).requires_grad_(False)
        self.fc = nn.Linear(dim, 8, bias=False)
        self.proj = nn.Linear(8, dim, bias=False)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + self.proj(F.gelu(self.fc(x))))


def build():
    torch.manual_seed(24)
    model = MLP()
    ids = torch.randint(0, 12, (3, 7))
    params = [model.head.weight, model.proj.weight, model.fc.weight]
    return SimpleNamespace(model=model, optimizer=NorMuon(params), batch=ids)


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.batch[:, :-1]).flatten(0, 1), s.batch[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

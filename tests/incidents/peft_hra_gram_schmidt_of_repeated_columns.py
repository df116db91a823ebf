"""PEFT's HRA (Householder reflection adaptation) with apply_GS=True and the symmetric initialisation, tuned on preference pairs.

For an even rank the vectors are made in equal pairs (repeat_interleave), so that neighbouring reflections cancel. Gram-Schmidt then subtracts from the
second vector of a pair its projection on the first: what is left is rounding residue of 1e-8, and it is divided by its own norm. Everything stays finite,
but the direction of the reflection is noise and its gradient is about a million times too large: one step of SGD throws the vectors to 1e4, where they
point anywhere and, being normalised, hardly move any more; the loss rises.
Source: https://github.com/huggingface/peft/blob/main/src/peft/tuners/hra/layer.py (reset_hra_parameters and get_delta_weight)
Heals: another initialisation with apply_GS (vectors that differ), refusing the combination, or a floor of 1e-2 under the norm. Does not: an epsilon of 1e-8 or 1e-6, float64 (the
residue and the gradient only move by nine orders), gradient clipping, a smaller learning rate.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward", "backward"),
    cause=("cancellation_spike",),
    op=("sub", "norm", "linalg_vector_norm", "div"),
    index=None,
    masked=None,
    role=("weights", "hidden"),
    fix=("fix_upstream", "clamp_denominator", "validate_config", "avoid_singular_op"),
    variable=("ui", None),
    line=("ui = ui - (weight[j].t() @ ui) * weight[j]", "weight.append((ui / ui.norm()).view(-1, 1))"),
)


class HRALinear(nn.Module):
    def __init__(self, base, r=2, apply_GS=True, init_weights=True):
        super().__init__()
        self.base, self.r, self.apply_GS = base.requires_grad_(False), r, apply_GS
        self.hra_u = nn.Parameter(torch.empty(base.in_features, r))
        if init_weights and r % 2 == 0:
            half_u = torch.zeros(base.in_features, r // 2)
            nn.init.kaiming_uniform_(half_u, a=math.sqrt(5))
            self.hra_u.data = torch.repeat_interleave(half_u, 2, dim=1)
        else:
            nn.init.kaiming_uniform_(self.hra_u, a=math.sqrt(5))

    def get_delta_weight(self):
        opt_u = self.hra_u
        if self.apply_GS:
            weight = [(opt_u[:, 0] / opt_u[:, 0].norm()).view(-1, 1)]
            for i in range(1, self.r):
                ui = opt_u[:, i].view(-1, 1)
                for j in range(i):
                    ui = ui - (weight[j].t() @ ui) * weight[j]
                weight.append((ui / ui.norm()).view(-1, 1))
            weight = torch.cat(weight, dim=1)
            return torch.eye(opt_u.shape[0]) - 2 * weight @ weight.t()
        opt_u = opt_u / opt_u.norm(dim=0)
        weight = torch.eye(opt_u.shape[0])
        for i in range(self.r):
            ui = opt_u[:, i].view(-1, 1)
            weight = weight - 2 * weight @ ui @ ui.t()
        return weight

    def forward(self, x):
        return F.linear(x, self.base.weight @ self.get_delta_weight(), self.base.bias)


class RewardModel(nn.Module):
    def __init__(self, vocab=50, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width).requires_grad_(False)
        self.proj = HRALinear(nn.Linear(width, width))
        self.score = nn.Linear(width, 1)

    def forward(self, ids):
        return self.score(torch.tanh(self.proj(self.embed(ids))).mean(1)).squeeze(-1)


def build():
    torch.manual_seed(1)
    model = RewardModel()
    batch = {"chosen": torch.randint(0, 50, (8, 12)), "rejected": torch.randint(0, 50, (8, 12))}
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = -F.logsigmoid(s.model(s.batch["chosen"]) - s.model(s.batch["rejected"])).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return {"loss": loss.item(), "hra_u": s.model.proj.hra_u.abs().max().item()}


if __name__ == "__main__":
    print(run())

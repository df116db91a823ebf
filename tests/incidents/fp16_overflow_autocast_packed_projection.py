"""Weights and inputs are healthy float32, but under float16 autocast one packed token projects beyond 65504 and layer
norm turns inf into NaN.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("addmm", "linear", "mm"),
    index=(9, 2),
    masked=None,
    role=("hidden", "logits"),
    fix=("upcast_fp32", "clamp_input"),
    variable=("wide",),
    line=("wide = self.up(x)",),
)


class Adapter(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.norm = nn.LayerNorm(inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        wide = self.up(x)
        return x + self.down(torch.relu(self.norm(wide)))


class OutcomeScorer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.adapters = nn.ModuleList([Adapter(width, 11), Adapter(width, 12)])
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        for adapter in self.adapters:
            x = adapter(x)
        return self.score(x).squeeze(-1)


def build():
    torch.manual_seed(136)
    model = OutcomeScorer()
    tokens = torch.randn(21, 8)
    tokens[9, 6] = 900.0
    with torch.no_grad():
        model.adapters[1].up.weight[2, 6] = 110.0
    cu_seqlens = [0, 6, 13, 21]
    outcome = torch.tensor([1.0, 0.0, 1.0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=(tokens, cu_seqlens, outcome))


def run(s=None):
    s = s or build()
    tokens, cu_seqlens, outcome = s.batch
    with torch.autocast("cpu", dtype=torch.float16):
        score = s.model(tokens)
    per_seq = torch.stack([score[a:b].float().mean() for a, b in pairwise(cu_seqlens)])
    loss = nn.functional.binary_cross_entropy_with_logits(per_seq, outcome)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""The angular-margin head recovers the sine as sqrt(1 - cos^2); a normalised dot product a little above 1 makes the
radicand negative.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(3, 1),
    masked=None,
    role=("logits", "hidden"),
    fix=("clamp_input", "avoid_singular_op", "clamp_denominator", "stable_function", "representable_eps"),
    variable=("sine",),
    line=("sine = torch.sqrt(1.0 - cosine.pow(2))",),
)


class MarginScorer(nn.Module):
    def __init__(self, width=24, n_styles=4, margin=0.2, scale=12.0):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(n_styles, width))
        self.margin, self.scale = margin, scale

    def forward(self, emb, style):
        cosine = F.normalize(emb, dim=-1) @ F.normalize(self.centres, dim=-1).t()
        sine = torch.sqrt(1.0 - cosine.pow(2))
        shifted = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        hot = F.one_hot(style, cosine.shape[-1]).bool()
        return self.scale * torch.where(hot, shifted, cosine)


class StyleReward(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(24, 24, bias=False)
        nn.init.eye_(self.adapter.weight)
        self.scorer = MarginScorer()

    def forward(self, pooled, style):
        return self.scorer(self.adapter(pooled), style)


def build():
    torch.manual_seed(134)
    model = StyleReward()
    pooled = torch.randn(6, 24)
    style = torch.tensor([0, 2, 3, 1, 0, 2])
    pooled[3] = 1.7 * model.scorer.centres.detach()[1]  # the reference answer itself is in the batch
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=2e-4), batch=(pooled, style))


def run(s=None):
    s = s or build()
    pooled, style = s.batch
    s.optimizer.zero_grad()
    loss = F.cross_entropy(s.model(pooled, style), style)
    loss.backward()
    s.optimizer.step()
    return loss

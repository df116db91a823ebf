"""Softmax per sequence over a packed row of tokens: segment maxima start at -inf and are filled by scatter_reduce."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the buffer of segment maxima starts at -inf and stays so for a segment that owns no token"


def segment_softmax(x, seg, n):
    top = torch.full((n,), float("-inf")).scatter_reduce(0, seg, x.detach(), reduce="amax")
    e = torch.exp(x - top[seg])
    total = torch.zeros(n).index_add(0, seg, e)
    return e / total[seg]


def build():
    torch.manual_seed(322)
    scorer = nn.Linear(4, 1)
    seg = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3])  # segment 2 is empty
    return SimpleNamespace(
        scorer=scorer, seg=seg, x=torch.randn(8, 4), v=torch.randn(8), opt=torch.optim.Adam(scorer.parameters(), lr=1e-2)
    )


def run(s=None):
    s = s or build()
    target = torch.tensor([0.5, -1.0, 0.0, 1.0])
    for _ in range(4):
        w = segment_softmax(s.scorer(s.x).squeeze(-1), s.seg, 4)
        pooled = torch.zeros(4).index_add(0, s.seg, w * s.v)
        loss = (pooled - target).pow(2).sum()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

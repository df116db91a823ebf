"""Graph attention with shortest-path distances as a bias: unreachable pairs are at distance inf and get weight exp(-inf) = 0."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the distance table holds inf, the bias -inf, and each node reaches at least itself"


def shortest_paths(edges, n):
    d = torch.full((n, n), float("inf"))
    d.fill_diagonal_(0.0)
    for a, b, w in edges:
        d[a, b] = d[b, a] = w
    for k in range(n):
        d = torch.minimum(d, d[:, k, None] + d[None, k, :])
    return d


def build():
    torch.manual_seed(402)
    layers = nn.ModuleDict({"qk": nn.Linear(5, 10), "v": nn.Linear(5, 5), "out": nn.Linear(5, 1)})
    dist = shortest_paths([(0, 1, 1.0), (1, 2, 0.5), (3, 4, 2.0)], 6)
    return SimpleNamespace(
        layers=layers, dist=dist, x=torch.randn(6, 5), y=torch.randn(6), opt=torch.optim.Adam(layers.parameters(), lr=5e-3)
    )


def run(s=None):
    s = s or build()
    for _ in range(4):
        q, k = s.layers["qk"](s.x).chunk(2, -1)
        att = torch.softmax(q @ k.T - s.dist, dim=-1)
        loss = (s.layers["out"](att @ s.layers["v"](s.x)).squeeze(-1) - s.y).square().mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

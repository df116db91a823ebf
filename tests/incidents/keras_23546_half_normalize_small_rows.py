"""Keras (torch backend), ops.normalize of half embeddings of small norm - a two-tower retriever.

normalize(order=2) takes square, sum, maximum and rsqrt in the dtype of its input. A row whose squared norm is about 2e-4 has a finite rsqrt of 70, but its derivative needs 70 ** 3, beyond half's
range. The loss is finite, the gradient is not. Source: https://github.com/keras-team/keras/issues/23546, keras/src/ops/nn.py (_normalize).
Heals: compute the squared norm and rsqrt in float32, x / norm with a clamped norm (its derivative divides twice instead of cubing), clamp the squared norm from below with something that half's
cube survives (1e-3). Does not: the epsilon of 1e-12 whose square is 0 in half, gradient clipping, nan_to_num on the output.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow",),
    op=("rsqrt",),
    index=(2, 0),
    masked=None,
    role=("hidden",),
    fix=("upcast_fp32", "stable_function", "clamp_input", "representable_eps", "clamp_denominator"),
    variable=("inv_norm",),
    line=("inv_norm = torch.rsqrt(torch.maximum(square_sum, eps))",),
)


def normalize(x, axis=-1, epsilon=1e-12):
    square_sum = torch.sum(torch.square(x), dim=axis, keepdim=True)
    eps = torch.tensor(epsilon**2, dtype=x.dtype)
    inv_norm = torch.rsqrt(torch.maximum(square_sum, eps))
    return x * inv_norm


class Tower(nn.Module):
    def __init__(self, vocab=40, dim=8):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.dense = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens):
        x = self.dense(self.embedding(tokens))
        return normalize(x.half())


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_tower = Tower()
        self.item_tower = Tower()

    def forward(self, query, item):
        return self.query_tower(query).float() @ self.item_tower(item).float().t() / 0.1


def build():
    torch.manual_seed(5)
    model = TwoTower()
    with torch.no_grad():
        model.query_tower.embedding.weight[30:] *= 0.008
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    query = torch.randint(0, 30, (5, 4))
    query[2] = torch.tensor([31, 33, 38, 35])
    item = torch.randint(0, 40, (5, 6))
    return SimpleNamespace(model=model, optimizer=optimizer, query=query, item=item)


def run(s=None):
    s = s or build()
    scores = s.model(s.query, s.item)
    loss = F.cross_entropy(scores, torch.arange(len(scores)))
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""A skill matrix is pulled towards its nearest orthogonal matrix U Vᵀ. It began as an outer product: all but one of its singular values are 0,
and the backward of svd divides by them and by their distances.

Numbers on the diagonal, no two alike, heal; clamping the singular values does not, backward does not read what is clamped.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("_linalg_svd", "linalg_svd", "svd"),
    index=None,
    masked=None,
    role=("hidden", "weights", "grad", "loss"),
    fix=("avoid_singular_op",),
    variable=("u", "vh"),
    line=("u, _, vh = torch.linalg.svd(skills, full_matrices=False)",),
)


def build():
    torch.manual_seed(34)
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[1, 2] = 1.5
    return SimpleNamespace(model=model, rows=torch.randn(6, 4), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def run(s=None):
    s = s or build()
    skills = s.model.weight * 1.0
    u, _, vh = torch.linalg.svd(skills, full_matrices=False)
    away = (skills - u @ vh).square().sum()
    loss = s.model(s.rows).square().mean() + 0.1 * away
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

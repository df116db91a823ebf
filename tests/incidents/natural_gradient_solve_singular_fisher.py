"""The natural gradient solves with a Fisher matrix that is the mean of outer products of scores. One feature was 0 in the whole batch, so a row
and a column of it are, and `solve_ex` divides by a pivot of 0 without a word.

Damping on the diagonal heals; `check_errors=True` would have stopped the run here.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("_linalg_solve_ex", "linalg_solve_ex", "solve"),
    index=None,
    masked=None,
    role=("grad", "loss", "hidden", "log_probs", "advantages"),
    fix=("avoid_singular_op",),
    variable=("direction",),
    line=("direction, _ = torch.linalg.solve_ex(fisher, gradient)",),
)


def build():
    torch.manual_seed(89)
    policy = nn.Linear(4, 1, bias=False)
    rows = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 0.0], [2.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 2.0, 1.0, 0.0]])
    return SimpleNamespace(model=policy, rows=rows, rewards=torch.randn(5), optimizer=torch.optim.SGD(policy.parameters(), lr=0.1))


def run(s=None):
    s = s or build()
    score = s.rows * s.model(s.rows).tanh()
    fisher = score.mT @ score / score.shape[0]
    gradient = (score * s.rewards[:, None]).mean(0)
    direction, _ = torch.linalg.solve_ex(fisher, gradient)
    loss = (direction * gradient).sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

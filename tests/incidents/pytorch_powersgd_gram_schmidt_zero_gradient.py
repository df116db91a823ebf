"""torch.distributed powerSGD_hook, _orthogonalize_gram_schmidt with epsilon=0 - low-rank compression of an all-zero gradient.

The output projection starts at zero, so the first layer's gradient is exactly zero in the first step. P = M Q is zero, its column divided by its
norm is 0 / 0 (tensors raise no ZeroDivisionError, so the hook's own except branch is never taken), the decompressed gradient and the error
memory are NaN and the optimizer writes NaN into the weight. The hook's documentation recommends an epsilon of 1e-8.
Source: https://github.com/pytorch/pytorch/blob/main/torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py
Heals: the epsilon, QR, no compression of a zero matrix. Does not: clipping gradients before or after the hook.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer", "backward"),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div", "div_"),
    index=(0, 0),
    masked=None,
    role=("grad", "optimizer"),
    fix=(
        "representable_eps",
        "clamp_denominator",
        "avoid_singular_op",
        "stable_function",
        "guard_empty",
        "validate_config",
        "skip_disabled_term",
    ),
    variable=("col",),
    line=("col /= torch.norm(col)",),
)


class PowerSGDState:
    def __init__(self, matrix_approximation_rank=2, orthogonalization_epsilon=0, seed=0):
        self.rank = matrix_approximation_rank
        self.epsilon = orthogonalization_epsilon
        self.generator = torch.Generator().manual_seed(seed)
        self.error_dict = {}


def orthogonalize_gram_schmidt(matrix, epsilon=0):
    """Columns of the matrix, in place."""
    num_cols = matrix.shape[1]
    for i in range(num_cols):
        col = matrix[:, i : i + 1]
        if epsilon == 0:
            try:
                col /= torch.norm(col)
            except ZeroDivisionError:
                col.fill_(0.0)
        else:
            col /= torch.norm(col) + epsilon
        if i + 1 < num_cols:
            rest = matrix[:, i + 1 :]
            rest -= torch.sum(col * rest, dim=0) * col


@torch.no_grad()
def powersgd_hook(state, named_parameters):
    for name, p in named_parameters:
        if p.grad is None or p.grad.dim() < 2:
            continue
        M = p.grad.view(p.grad.shape[0], -1)
        M = M + state.error_dict.get(name, torch.zeros_like(M))
        Q = torch.randn(M.shape[1], state.rank, generator=state.generator)
        P = M @ Q
        orthogonalize_gram_schmidt(P, state.epsilon)
        Q = M.t() @ P
        decompressed = P @ Q.t()
        state.error_dict[name] = M - decompressed
        p.grad.copy_(decompressed.view_as(p.grad))


def build():
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 6, bias=False))
    nn.init.zeros_(model[2].weight)
    x, y = torch.randn(16, 8), torch.randint(0, 6, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return SimpleNamespace(model=model, x=x, y=y, optimizer=optimizer, state=PowerSGDState())


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.x), s.y)
    s.optimizer.zero_grad()
    loss.backward()
    powersgd_hook(s.state, s.model.named_parameters())
    s.optimizer.step()
    return loss

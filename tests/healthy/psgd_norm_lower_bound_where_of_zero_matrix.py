"""PSGD `norm_lower_bound` in its branch-free form: the bound of a zero matrix is NaN in the branch that where leaves out.

One layer gets no gradient signal in the first step (its output gate is zero-initialised), so the curvature matrix of its preconditioner is
all zero and A / max|A| is 0/0. The result is computed under no_grad and torch.where takes max|A| = 0 instead; a tiny constant keeps the
step size finite. Nothing differentiates through it: the weights are right.

https://github.com/lixilinx/psgd_torch (norm_lower_bound; ports replace its `if` by torch.where to stay free of syncs)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def _lb(A, max_abs):
    A = A / max_abs
    value, j = torch.max(torch.sum(A * A, dim=1), 0)
    x = A @ A[j]
    return max_abs * torch.linalg.vector_norm(A.T @ (x / torch.linalg.vector_norm(x)))


def norm_lower_bound(A):
    max_abs = A.abs().amax()
    return torch.where(max_abs > 0, _lb(A, max_abs), max_abs)


class LeftWhitening(torch.optim.Optimizer):
    """Keeps Q with Q^T Q ~ (G G^T)^-1/2 for matrices; plain sgd for vectors."""

    def __init__(self, params, lr=1e-2, precond_lr=0.1):
        super().__init__(params, dict(lr=lr, precond_lr=precond_lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() != 2:
                    p.add_(p.grad, alpha=-group["lr"])
                    continue
                state = self.state[p]
                if "Q" not in state:
                    state["Q"] = torch.eye(p.size(0), dtype=p.dtype)
                Q = state["Q"]
                A = Q @ p.grad
                AAh = A @ A.T
                bound = norm_lower_bound(AAh)
                Q.sub_(group["precond_lr"] / (bound + 1.0) * torch.triu(AAh) @ Q)
                p.add_(Q.T @ (Q @ p.grad), alpha=-group["lr"])


class GatedMlp(nn.Module):
    def __init__(self, dim=8, classes=4):
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)
        self.gate = nn.Parameter(torch.zeros(dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(x + self.gate * self.down(torch.relu(self.up(x))))


def build():
    torch.manual_seed(126)
    model = GatedMlp()
    optimizer = LeftWhitening(model.parameters())
    x = torch.randn(3, 10, 8)
    labels = torch.randint(0, 4, (3, 10))
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, labels=labels)


def run(s=None):
    s = s or build()
    for x, labels in zip(s.x, s.labels):
        loss = F.cross_entropy(s.model(x), labels)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

"""pytorch #76531 / #23133 - ZCA whitening by an eigendecomposition, two dead channels.

Features behind a ReLU are whitened with V diag(1/sqrt(l)) V^T of their covariance. Two channels are dead: both have the eigenvalue
eps exactly. The forward is right; the backward of eigh divides by the difference of the two eigenvalues, and every gradient below is NaN.

Source: https://github.com/pytorch/pytorch/issues/76531 (and issues/23133, issues/49886): NaN of eigh's backward for equal eigenvalues.
Heals: a whitening that needs no eigenvectors (a Cholesky factor, Newton-Schulz). Does not heal: a larger eps on the diagonal, it moves
both eigenvalues alike; clamping the eigenvalues before the root.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("linalg_eigh", "eigh", "_linalg_eigh"),
    index=None,
    masked=None,
    role=("hidden", "grad"),
    fix=("avoid_singular_op", "stable_function"),
    variable=("eigvecs", "eigvals", None),
    line=("eigvals, eigvecs = torch.linalg.eigh(cov)",),
)


class ZCAWhitening(nn.Module):
    def __init__(self, eps=1e-3):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        x = x - x.mean(0, keepdim=True)
        cov = x.T @ x / (x.size(0) - 1) + self.eps * torch.eye(x.size(1))
        eigvals, eigvecs = torch.linalg.eigh(cov)
        inv_sqrt = eigvecs @ torch.diag(eigvals.rsqrt()) @ eigvecs.T
        return x @ inv_sqrt


class WhitenedEncoder(nn.Module):
    """Self-supervised encoder whose embeddings are whitened, as in W-MSE."""

    def __init__(self, in_dim=10, hidden=8):
        super().__init__()
        self.backbone = nn.Linear(in_dim, hidden)
        self.whitening = ZCAWhitening()

    def forward(self, x):
        return self.whitening(F.relu(self.backbone(x)))


def w_mse_loss(z0, z1):
    z0, z1 = F.normalize(z0, dim=-1), F.normalize(z1, dim=-1)
    return (2 - 2 * (z0 * z1).sum(-1)).mean()


def build():
    torch.manual_seed(76531)
    model = WhitenedEncoder()
    with torch.no_grad():
        model.backbone.bias[:2] = -20.0  # two units that died earlier in training
    x = torch.randn(32, 10)
    views = (x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, views=views)


def run(s=None):
    s = s or build()
    loss = w_mse_loss(s.model(s.views[0]), s.model(s.views[1]))
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

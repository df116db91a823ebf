"""NVIDIA Emerging-Optimizers #267 - inverse root by eigendecomposition, eigenvalues clamped at 0 and then rsqrt.

The optimizer orthogonalises the gradient G of a weight matrix as G (G^T G)^(-1/2). Two input features of the layer are never on in this batch,
so two columns of G are exactly 0 and the Gram matrix is singular. `clamp_min(0)` keeps the eigenvalue from being negative, and rsqrt(0) is inf;
the eigenvectors are multiplied by it (0 * inf) and the whole update, hence the whole weight, is NaN. Loss and gradients are finite.

Source: https://github.com/NVIDIA-NeMo/Emerging-Optimizers/pull/267 (review thread on `inv_root_via_eigh`).

Heals: floor the eigenvalues at a positive number before rsqrt. Does not heal: `clamp_min(0)` (it is here), clipping the gradient, a step that is
skipped if a gradient is non-finite (none is).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_denominator",),
    op=("rsqrt",),
    index=(0,),
    masked=None,
    role=("optimizer",),
    fix=("clamp_denominator", "clamp_input", "representable_eps"),
    variable=("inv_root",),
    line=("inv_root = eigenvalues.clamp_min(0).rsqrt()",),
)


def inv_sqrt_via_eigh(x):
    """(x)^(-1/2) of a symmetric positive semi-definite matrix."""
    eigenvalues, eigenvectors = torch.linalg.eigh(x)
    inv_root = eigenvalues.clamp_min(0).rsqrt()
    return (eigenvectors * inv_root) @ eigenvectors.mT


class SpectralDescent(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buf = state["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(p.grad)
                g = p.grad.add(buf, alpha=group["momentum"])
                update = g @ inv_sqrt_via_eigh(g.mT @ g)
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class Classifier(nn.Module):
    def __init__(self, features=6, hidden=16, classes=5):
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)))


def build():
    torch.manual_seed(2105)
    model = Classifier()
    features = torch.randn(24, 6)
    features[:, [1, 4]] = 0.0  # one-hot flags that this batch does not have
    return SimpleNamespace(
        model=model,
        features=features,
        labels=torch.randint(0, 5, (24,)),
        optimizer=SpectralDescent([model.fc1.weight]),
        side_optimizer=torch.optim.AdamW([model.fc1.bias, *model.fc2.parameters()], lr=1e-3),
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    s.side_optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(s.model(s.features), s.labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.side_optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

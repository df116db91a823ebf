"""higher, DifferentiableAdam with its mask hook - a meta-learned per-feature learning rate, features that the batch does not show.

The second moment of those features is exactly 0 and SqrtBackward returns NaN for them (anomaly mode stops there, issue 125), but the hook that the library registers on exp_avg_sq replaces the
gradient by 0 at exactly these elements before it goes on. Outer loss, gradients and weights are finite and equal to those of a run with torch.where around the root.
Source: https://github.com/facebookresearch/higher/issues/125, higher/optim.py (DifferentiableAdam, _maybe_mask).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def _get_mask_closure(mask):
    def closure(grad):
        grad = torch.where(mask, torch.zeros_like(grad), grad)
        if grad.requires_grad:
            grad.register_hook(_get_mask_closure(mask))
        return grad

    return closure


def _maybe_mask(tensor, mask):
    if tensor.requires_grad:
        tensor.register_hook(_get_mask_closure(mask))


class DifferentiableAdam:
    def __init__(self, lr, betas=(0.9, 0.999), eps=1e-8):
        self.lr, self.betas, self.eps, self.state = lr, betas, eps, {}

    def step(self, params, grads):
        beta1, beta2 = self.betas
        new = []
        for idx, (p, g) in enumerate(zip(params, grads)):
            state = self.state.setdefault(idx, {"step": 0, "exp_avg": torch.zeros_like(p.data), "exp_avg_sq": torch.zeros_like(p.data)})
            state["step"] += 1
            bias_correction1 = 1 - beta1 ** state["step"]
            bias_correction2 = 1 - beta2 ** state["step"]
            state["exp_avg"] = exp_avg = state["exp_avg"] * beta1 + (1 - beta1) * g
            state["exp_avg_sq"] = exp_avg_sq = state["exp_avg_sq"] * beta2 + (1 - beta2) * g * g
            mask = exp_avg_sq == 0.0
            _maybe_mask(exp_avg_sq, mask)
            denom = exp_avg_sq.sqrt() / math.sqrt(bias_correction2) + self.eps
            step_size = self.lr / bias_correction1
            new.append(p - step_size * exp_avg / denom)
        return new


class MetaFeatures(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.scale = nn.Linear(dim, dim)

    def forward(self, x):
        return x * torch.sigmoid(self.scale(x))


def build():
    torch.manual_seed(0)
    model = MetaFeatures()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    support = torch.randn(8, 6)
    support[:, 2] = 0.0
    support[:, 5] = 0.0
    query = torch.randn(8, 6)
    w = torch.randn(6)
    return SimpleNamespace(
        model=model, optimizer=optimizer, support=support, ys=support @ w, query=query, yq=query @ w, inner=DifferentiableAdam(0.1)
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.inner.state = {}
        fast = [torch.zeros(6, requires_grad=True), torch.zeros(1, requires_grad=True)]
        for _ in range(2):
            inner_loss = F.mse_loss(s.model(s.support) @ fast[0] + fast[1], s.ys)
            grads = torch.autograd.grad(inner_loss, fast, create_graph=True)
            fast = s.inner.step(fast, grads)
        loss = F.mse_loss(s.model(s.query) @ fast[0] + fast[1], s.yq)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

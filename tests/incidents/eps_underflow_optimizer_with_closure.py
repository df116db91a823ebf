"""A hand-written optimizer for half-precision weights divides by sqrt(v) + 1e-8; the epsilon is 0 in float16 and so is v."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow",),
    op=("addcdiv", "div"),
    index=None,
    masked=None,
    role=("optimizer",),
    fix=("representable_eps", "upcast_fp32"),
    variable=("0.weight",),
    line=('p.addcdiv_(p.grad, square.sqrt().add_(group["eps"]), value=-group["lr"])',),
)


class HalfRms(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, decay=0.99, eps=1e-8):
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("square", torch.zeros_like(p))
                square.mul_(group["decay"]).addcmul_(p.grad, p.grad, value=1 - group["decay"])
                p.addcdiv_(p.grad, square.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss


def build():
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).half()
    return SimpleNamespace(model=model, optimizer=HalfRms(model.parameters()), batch=(torch.randn(8, 5).half(), torch.randn(8, 1).half()))


def run(s=None):
    s = s or build()
    features, returns = s.batch

    def closure():
        s.optimizer.zero_grad()
        loss = 1e-3 * (s.model(features) - returns).square().mean()
        loss.backward()
        return loss

    return s.optimizer.step(closure)

"""fairscale #50 (and ultralytics #24085) - memory-efficient mixed precision keeps fp16 weights and fp32 Adam moments. On resume
Optimizer.load_state_dict casts the moments to the dtype of the weights: the second moment underflows to 0, and so does the epsilon.

https://github.com/facebookresearch/fairscale/issues/50
https://github.com/ultralytics/ultralytics/pull/24085
Casting the moments back to fp32 from the original checkpoint heals. Clipping the gradient norm does not, nor does a later .float() of the update.
"""

import copy
import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights", "grad"),
    fix=("upcast_fp32", "representable_eps", "fix_upstream", "clamp_denominator"),
    variable=("update",),
    line=("update = exp_avg / denom",),
)


class Adam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, scale=1.0):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.float() / scale
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                state["step"] += 1
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).add_(grad * grad, alpha=1 - beta2)
                step_size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                denom = exp_avg_sq.sqrt().add_(group["eps"])
                update = exp_avg / denom
                p.add_(update.to(p.dtype), alpha=-step_size)


def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).half()


def train_step(model, optimizer, x, y, scale=1024.0):
    optimizer.zero_grad()
    loss = 0.005 * (model(x).float() - y).pow(2).mean()
    (loss * scale).backward()
    optimizer.step(scale=scale)
    return loss


def build():
    torch.manual_seed(50)
    x, y = torch.randn(16, 6).half(), torch.randn(16, 3)
    model = make_model()
    optimizer = Adam(model.parameters())
    for _ in range(5):
        train_step(model, optimizer, x, y)
    checkpoint = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}

    resumed = make_model()
    resumed.load_state_dict(checkpoint["model"])
    optimizer = Adam(resumed.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    return SimpleNamespace(model=resumed, optimizer=optimizer, x=x, y=y)


def run(s=None):
    s = s or build()
    loss = train_step(s.model, s.optimizer, s.x, s.y)
    return loss


if __name__ == "__main__":
    print(run())

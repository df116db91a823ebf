"""Cautious AdamW on a fresh LoRA adapter: at step one lora_A has a gradient of exactly 0, the mask's mean is 0, and 0/0 becomes its update.

The cautious optimiser keeps the coordinates where momentum and gradient agree and divides the mask by its mean so that the update keeps its
size.  lora_B starts at zero, so the first gradient of lora_A is zero everywhere: no coordinate agrees, mean 0, mask 0/0.  Loss and gradients
are finite; lora_A is NaN after the step.

Source: the `caution` branch of https://github.com/huggingface/pytorch-image-models/blob/main/timm/optim/adamw.py and
https://github.com/kyleliang919/C-Optim (both divide by mask.mean().clamp_(min=1e-3)); planted: the clamp is missing.
Heals: the clamp.  Tempting and no help: a larger Adam eps, clipping the gradient norm, warm-up (NaN * lr).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div", "div_"),
    index=(0, 0),
    masked=None,
    role=("optimizer",),
    fix=("clamp_denominator", "guard_empty", "representable_eps", "clamp_input"),
    variable=("mask", None),
    line=("mask.div_(mask.mean())",),
)


class CautiousAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                state["step"] += 1
                exp_avg.mul_(beta1).add_(grad, alpha=1.0 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                bias_correction1 = 1.0 - beta1 ** state["step"]
                bias_correction2 = 1.0 - beta2 ** state["step"]
                denom = (exp_avg_sq.sqrt() / math.sqrt(bias_correction2)).add_(group["eps"])

                mask = (exp_avg * grad > 0).to(grad.dtype)
                mask.div_(mask.mean())
                update = exp_avg * mask / denom

                if group["weight_decay"]:
                    p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] / bias_correction1)


class LoraLinear(nn.Module):
    def __init__(self, base, r=4, lora_alpha=8):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = lora_alpha / r
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base_layer(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


class Classifier(nn.Module):
    def __init__(self, dim=16, classes=5):
        super().__init__()
        self.proj = LoraLinear(nn.Linear(dim, dim))
        self.norm = nn.LayerNorm(dim).requires_grad_(False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.proj(x))))


def build():
    torch.manual_seed(16085)
    model = Classifier()
    x = torch.randn(8, 16)
    y = torch.randint(0, 5, (8,))
    params = [p for p in model.parameters() if p.requires_grad]
    return SimpleNamespace(model=model, optimizer=CautiousAdamW(params, lr=2e-4), x=x, y=y)


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.x), s.y)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

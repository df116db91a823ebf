"""Prodigy on LoRA weights in float16 - the step's denominator is sqrt(exp_avg_sq) + d * eps, and both underflow.

At the start d = 1e-6: the second moment is d^2 * (1 - beta2) * g^2, the epsilon is d * 1e-8 = 1e-14, and half precision ends at 6e-8.
Denominator and first moment are both 0, addcdiv_ writes NaN into the adapter while loss and gradients are finite. Source:
https://github.com/konstmish/prodigy/blob/main/prodigyopt/prodigy.py (optimizer state takes the dtype of the parameter). Keeping the
adapter and the state in float32 heals, an epsilon that half can hold keeps it finite; clipping the gradient does not.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("addcdiv_", "addcdiv", "div"),
    index=(0, 0),
    masked=None,
    role=("weights", "optimizer"),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator"),
    variable=("p", "lora_A", None),
    line=("p.addcdiv_(exp_avg, denom, value=-dlr)",),
)


class Prodigy(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, betas=(0.9, 0.999), eps=1e-8, d0=1e-6, d_coef=1.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, d=d0, d0=d0, d_max=d0, d_numerator=0.0, d_coef=d_coef))

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        beta3 = math.sqrt(beta2)
        d, d0 = group["d"], group["d0"]
        dlr = d * group["lr"]
        d_numerator, d_denom = group["d_numerator"] * beta3, 0.0
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["s"] = torch.zeros_like(p)
                state["p0"] = p.detach().clone()
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
            d_numerator += (d / d0) * dlr * (p.grad.float() * (state["p0"] - p).float()).sum().item()
            state["exp_avg"].mul_(beta1).add_(p.grad, alpha=d * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=d * d * (1 - beta2))
            state["s"].mul_(beta3).add_(p.grad, alpha=(d / d0) * dlr)
            d_denom += state["s"].float().abs().sum().item()
        if d_denom == 0:
            return
        group["d_numerator"] = d_numerator
        group["d_max"] = max(group["d_max"], group["d_coef"] * d_numerator / d_denom)
        group["d"] = group["d_max"]
        for p in group["params"]:
            if p.grad is None:
                continue
            exp_avg, exp_avg_sq = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
            denom = exp_avg_sq.sqrt().add_(d * group["eps"])
            p.addcdiv_(exp_avg, denom, value=-dlr)


class LoraHead(nn.Module):
    def __init__(self, vocab=16, dim=8, r=2, dtype=torch.float16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, dtype=dtype).requires_grad_(False)
        self.base = nn.Linear(dim, vocab, bias=False, dtype=dtype).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, dim).to(dtype))
        self.lora_B = nn.Parameter((0.1 * torch.randn(vocab, r)).to(dtype))

    def forward(self, ids):
        h = self.embed(ids)
        return self.base(h) + h @ self.lora_A.T @ self.lora_B.T


def build(dtype=torch.float16, eps=1e-8):
    torch.manual_seed(55)
    model = LoraHead(dtype=dtype)
    optimizer = Prodigy([model.lora_A, model.lora_B], eps=eps)
    return SimpleNamespace(
        model=model, optimizer=optimizer, ids=torch.randint(0, 16, (4, 6)), advantages=torch.tensor([1.2, -0.4, 0.3, -1.1])
    )


def run(s=None):
    s = s or build()
    logps = s.model(s.ids[:, :-1]).float().log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    ratio = (logps - logps.detach()).exp()
    loss = -(ratio * s.advantages[:, None]).sum(-1).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""LoRA fine-tuning with Stable-SPAM: the gradient of lora_A is exactly zero in the first step and the adaptive norm scaling divides by its norm.

Stable-SPAM rescales each gradient to a running norm: grad / |grad| * c. lora_B starts at zero, therefore dL/dA is zero in the first step, |grad| is 0
and the unit gradient is 0 / 0. Loss and gradients are finite; after optimizer.step lora_A is NaN, and the next loss too. The reference
implementation asks `if grad_norm > 0`, the port without the question lives in several optimizer collections.
Source: Stable-SPAM (https://github.com/TianjinYellow/StableSPAM, norm scaling with m_norm_t / v_norm_t) and a port of it that dropped the guard
Heals: grad_norm.clamp_min(eps), or leaving a zero gradient as it is. Does not: clipping before the step, skipping on a bad loss, fp32.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer", "grad"),
    fix=("clamp_denominator", "avoid_singular_op", "where_on_detached"),
    variable=("unit",),
    line=("unit = grad / grad_norm",),
)


class StableSPAM(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, gamma1=0.85, gamma2=0.99999, theta=0.999):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.gamma1, self.gamma2, self.theta = gamma1, gamma2, theta

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.clone()
                state = self.state[p]
                if not state:
                    state.update(
                        step=0,
                        exp_avg=torch.zeros_like(p),
                        exp_avg_sq=torch.zeros_like(p),
                        m_norm_t=grad.new_zeros(()),
                        v_norm_t=grad.new_zeros(()),
                        m_max_t=grad.new_zeros(()),
                    )
                state["step"] += 1
                t = state["step"]
                max_gradient = grad.abs().max()
                state["m_max_t"] = self.theta * state["m_max_t"] + (1 - self.theta) * max_gradient
                m_max_hat = state["m_max_t"] / (1 - self.theta**t)
                grad.clamp_(-m_max_hat, m_max_hat)
                grad_norm = torch.norm(grad)
                state["m_norm_t"] = self.gamma1 * state["m_norm_t"] + (1 - self.gamma1) * grad_norm
                state["v_norm_t"] = self.gamma2 * state["v_norm_t"] + (1 - self.gamma2) * grad_norm**2
                m_norm_hat = state["m_norm_t"] / (1 - self.gamma1**t)
                v_norm_hat = state["v_norm_t"] / (1 - self.gamma2**t)
                c_norm_t = m_norm_hat / (v_norm_hat.sqrt() + group["eps"])
                unit = grad / grad_norm
                grad = unit * c_norm_t
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denom = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt().add_(group["eps"])
                p.addcdiv_(state["exp_avg"], denom, value=-group["lr"] / (1 - beta1**t))


class LoraLinear(nn.Module):
    def __init__(self, base, r=2, lora_alpha=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = lora_alpha / r

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scaling


def build():
    torch.manual_seed(29)
    model = nn.Sequential(nn.Embedding(15, 8), LoraLinear(nn.Linear(8, 8)), nn.SiLU(), nn.Linear(8, 15))
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    optimizer = StableSPAM([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": torch.randint(0, 15, (3, 6))})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        ids = s.batch["input_ids"]
        loss = F.cross_entropy(s.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

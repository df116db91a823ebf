"""APOLLO (LLaMA-Factory, ms-swift, TRL: --optim apollo_adamw) on a critic kept in pure fp16, its value head initialised to zero.

On the first step the head's zeros stop the gradient, so the layer below it has a gradient of exactly 0. APOLLO's channel scale divides the norm of
the Adam update by the norm of the gradient plus 1e-8; in half precision 1e-8 is 0, and 0 / 0 writes NaN into the whole layer. Loss and
gradients of that step are finite.

Source: https://github.com/hiyouga/LlamaFactory/pull/6617 (APOLLO), apollo_torch/apollo.py: scaling_factor = norm(norm_grad) / (norm(grad) + 1e-8)
Heals: an epsilon that half precision can hold, the norms in float32, a floor under the denominator. Does not: gradient clipping, loss scaling, a larger
eps of Adam.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div", "true_divide", "truediv"),
    index=(0,),
    masked=None,
    role=("optimizer",),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator", "avoid_singular_op"),
    variable=("scaling_factor",),
    line=("scaling_factor = torch.norm(norm_grad, dim=norm_dim) / (torch.norm(grad, dim=norm_dim) + 1e-8)",),
)


class APOLLO(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, rank=4, scale=1.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, rank=rank, scale=scale))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                grad = p.grad
                low_rank = p.dim() > 1 and min(p.shape) > group["rank"]
                norm_dim = 0 if low_rank and p.shape[0] < p.shape[1] else 1
                if not state:
                    state["step"] = 0
                    if low_rank:
                        size = p.shape[norm_dim]
                        state["projector"] = torch.randn(size, group["rank"], dtype=p.dtype) / math.sqrt(group["rank"])
                if low_rank:
                    grad = grad @ state["projector"] if norm_dim == 1 else state["projector"].t() @ grad
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(grad)
                    state["exp_avg_sq"] = torch.zeros_like(grad)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                norm_grad = state["exp_avg"] / denom
                if low_rank:
                    scaling_factor = torch.norm(norm_grad, dim=norm_dim) / (torch.norm(grad, dim=norm_dim) + 1e-8)
                    norm_grad = p.grad * scaling_factor.unsqueeze(norm_dim) * math.sqrt(group["scale"])
                bias = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                p.add_(norm_grad, alpha=-group["lr"] * bias)


class Critic(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(30, hidden)
        self.dense = nn.Linear(hidden, 8, bias=False)
        self.value_head = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, ids):
        return self.value_head(torch.tanh(self.dense(self.embed(ids)))).squeeze(-1)


def build():
    torch.manual_seed(21)
    critic = Critic()
    critic.embed.weight.requires_grad_(False)
    critic = critic.half()
    optimizer = APOLLO([p for p in critic.parameters() if p.requires_grad])
    ids = torch.randint(0, 30, (4, 6))
    returns = torch.randn(4, 6)
    mask = torch.ones(4, 6)
    mask[1, 4:] = 0.0
    return SimpleNamespace(model=critic, optimizer=optimizer, ids=ids, returns=returns, mask=mask)


def run(s=None):
    s = s or build()
    values = s.model(s.ids).float()
    loss = 0.5 * (((values - s.returns) ** 2) * s.mask).sum() / s.mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

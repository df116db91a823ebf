"""D-Adaptation Adam on a model that was cast to half as a whole ("full fp16" of kohya's sd-scripts), fine-tuning a small text decoder.

exp_avg_sq lives in the dtype of the parameter. Gradients of 1e-3 squared times (1 - beta2) are below the smallest half, so the second moment is 0; eps=1e-8 is no half
number either and adds nothing. The denominator is 0 where the gradient is not: the update is infinite (0/0 where the row has no gradient), while loss and gradients are fine.
Source: https://github.com/kohya-ss/sd-scripts/issues/430
Heals: an eps that half can hold, moments kept in fp32.  Does not: gradient clipping, a smaller rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer",),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("update",),
    line=("update = exp_avg / denom",),
)


class DAdaptAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, betas=(0.9, 0.999), eps=1e-8, d0=1e-4, growth_rate=1.02):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.d, self.growth_rate, self.numerator = d0, growth_rate, 0.0

    @torch.no_grad()
    def step(self):
        sk_l1, numerator_acum = 0.0, 0.0
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            dlr = self.d * group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    state["s"] = torch.zeros_like(p, dtype=torch.float32)
                exp_avg, exp_avg_sq, s = state["exp_avg"], state["exp_avg_sq"], state["s"]
                numerator_acum += dlr * torch.dot(p.grad.flatten().float(), s.flatten()).item()
                exp_avg.mul_(beta1).add_(p.grad, alpha=dlr * (1 - beta1) / self.d)
                exp_avg_sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                s.mul_(beta2**0.5).add_(p.grad.float(), alpha=dlr * (1 - beta2**0.5))
                sk_l1 += s.abs().sum().item()
                denom = exp_avg_sq.sqrt().add_(group["eps"])
                update = exp_avg / denom
                p.sub_(update * dlr)
        self.numerator = beta2**0.5 * self.numerator + (1 - beta2**0.5) * numerator_acum
        d_hat = self.numerator / ((1 - beta2**0.5) * sk_l1) if sk_l1 else self.d
        self.d = max(self.d, min(d_hat, self.d * self.growth_rate))


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 30)).half()
    optimizer = DAdaptAdam(model.parameters())
    batch = {"input_ids": torch.randint(2, 30, (4, 17))}
    batch["input_ids"][0, 0] = 0
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["input_ids"]
    for _ in range(2):
        logits = s.model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

"""AnyPrecisionAdamW keeps its step counter in torch.tensor(0.0). The preference-tuning script runs under a default dtype of bfloat16, so the counter is
bf16, 0.999 ** 1 rounds to 1 and the second bias correction is exactly 0. A row of the embedding that has no gradient (padding) divides
sqrt(0) by 0: its weights are NaN after the first step, with a finite loss and finite gradients.

Source: https://github.com/meta-llama/llama-recipes src/llama_recipes/policies/anyprecision_optimizer.py, AnyPrecisionAdamW.step.
Heals: a float32 counter, or a floor under the bias correction. A larger eps does not (it is added after the division).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.optimizer import Optimizer

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero", "zero_denominator", "eps_underflow"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("upcast_fp32", "clamp_denominator"),
    variable=("centered_variance",),
    line=('centered_variance = state["exp_avg_sq"].sqrt() / denom_correction',),
)


class AnyPrecisionAdamW(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                step = state["step"]
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                step_size = group["lr"] / (1 - beta1**step)
                denom_correction = (1 - beta2**step) ** 0.5
                centered_variance = state["exp_avg_sq"].sqrt() / denom_correction
                denom = centered_variance.add(group["eps"])
                p.addcdiv_(state["exp_avg"], denom, value=-float(step_size))


class Policy(nn.Module):
    def __init__(self, vocab=14, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def mean_logps(model, ids):
    logits = model(ids[:, :-1]).float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)


def simpo_loss(chosen_logps, rejected_logps, beta=2.0, gamma=0.5):
    return -F.logsigmoid(beta * (chosen_logps - rejected_logps) - gamma).mean()


def build():
    torch.manual_seed(32)
    torch.set_default_dtype(torch.bfloat16)
    model = Policy()
    chosen = torch.randint(1, 14, (4, 8))
    rejected = torch.randint(1, 14, (4, 8))
    return SimpleNamespace(model=model, optimizer=AnyPrecisionAdamW(model.parameters(), lr=1e-3), chosen=chosen, rejected=rejected)


def run(s=None):
    s = s or build()
    loss = simpo_loss(mean_logps(s.model, s.chosen), mean_logps(s.model, s.rejected))
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())

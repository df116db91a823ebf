"""LMFlow RAFT with AdaBelief in pure fp16 - eps = 1e-8 is 0 in half precision, twice: in the variance and in the denominator.

An embedding row whose token is not in the batch has gradient 0, so its moment and its belief variance are both 0: the update is 0/0 and the
row is NaN after the first step although loss and gradients are finite. Source: OptimalScale/LMFlow, src/lmflow/optim/adabelief.py (which
converts half weights to fp32 for the step; this copy lost that).
Heals: an eps that half can hold (1e-4), or fp32 moments and weights. Does not: a smaller learning rate, clipping the gradient.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("addcdiv", "addcdiv_"),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator", "guard_empty", "clamp_input"),
    variable=("p", "embed.weight", None),
    line=("p.addcdiv_(exp_avg, denom, value=-step_size)",),
)


class AdaBelief(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_var"] = torch.zeros_like(p)
                exp_avg, exp_avg_var = state["exp_avg"], state["exp_avg_var"]
                state["step"] += 1
                bias_correction1 = 1 - beta1 ** state["step"]
                bias_correction2 = 1 - beta2 ** state["step"]
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                residual = grad - exp_avg
                exp_avg_var.mul_(beta2).addcmul_(residual, residual, value=1 - beta2)
                denom = (exp_avg_var.add_(group["eps"]).sqrt() / math.sqrt(bias_correction2)).add_(group["eps"])
                step_size = group["lr"] / bias_correction1
                p.addcdiv_(exp_avg, denom, value=-step_size)


class HalfLM(nn.Module):
    def __init__(self, vocab=20, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.head(self.embed(ids))


def build():
    torch.manual_seed(37)
    model = HalfLM().half()
    ids = torch.randint(4, 20, (6, 9))  # the special tokens 0..3 do not occur in the best-of-n samples
    rewards = torch.tensor([0.9, 0.1, 0.8, 0.4, 0.7, 0.2])
    return SimpleNamespace(model=model, ids=ids, rewards=rewards, optimizer=AdaBelief(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    best = s.ids[s.rewards.topk(3).indices]  # RAFT: fine-tune on the best samples
    logits = s.model(best[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), best[:, 1:].flatten(), reduction="sum")
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

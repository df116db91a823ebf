"""Adafactor of pytorch-optimizer on half parameters: eps 1e-30 is 0 in fp16, an embedding row without gradient divides by zero.

The squared gradient is kept in the dtype of the gradient. For tokens that the batch does not hold grad ** 2 + 1e-30 is exactly 0 in half, the
row factor is rsqrt(0) = inf, and inf * grad (0) is NaN in the update. Loss and gradients are finite, the embedding is NaN afterwards (all
of it: the update is divided by its own rms, which is NaN).
Source: https://github.com/jettify/pytorch-optimizer/blob/master/torch_optimizer/adafactor.py (fairseq's and transformers' cast to fp32).
Heals: the statistics in fp32, an eps that half can hold, a floor under the row statistics. Does not: gradient clipping, clip_threshold.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow",),
    op=("rsqrt_", "rsqrt"),
    index=(5,),
    masked=None,
    role=("optimizer",),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator", "where_on_detached", "guard_empty"),
    variable=("r_factor", None),
    line=("r_factor = (exp_avg_sq_row / exp_avg_sq_row.mean(dim=-1)).rsqrt_()",),
)


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, eps2=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8):
        super().__init__(params, dict(lr=lr, eps2=eps2, clip_threshold=clip_threshold, decay_rate=decay_rate))

    def _rms(self, tensor):
        return tensor.norm(2) / (tensor.numel() ** 0.5)

    def _approx_sq_grad(self, exp_avg_sq_row, exp_avg_sq_col):
        r_factor = (exp_avg_sq_row / exp_avg_sq_row.mean(dim=-1)).rsqrt_()
        c_factor = exp_avg_sq_col.unsqueeze(-2).rsqrt()
        return torch.mul(r_factor.unsqueeze(-1), c_factor)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    if grad.dim() >= 2:
                        state["exp_avg_sq_row"] = torch.zeros(grad.shape[:-1]).type_as(grad)
                        state["exp_avg_sq_col"] = torch.zeros(grad.shape[:-2] + grad.shape[-1:]).type_as(grad)
                    else:
                        state["exp_avg_sq"] = torch.zeros_like(grad)
                state["step"] += 1
                lr = max(group["eps2"][1], float(self._rms(p))) * group["lr"]
                beta2t = 1.0 - math.pow(state["step"], group["decay_rate"])
                update = (grad**2) + group["eps2"][0]
                if grad.dim() >= 2:
                    row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
                    row.mul_(beta2t).add_(update.mean(dim=-1), alpha=1.0 - beta2t)
                    col.mul_(beta2t).add_(update.mean(dim=-2), alpha=1.0 - beta2t)
                    update = self._approx_sq_grad(row, col).mul_(grad)
                else:
                    state["exp_avg_sq"].mul_(beta2t).add_(update, alpha=1.0 - beta2t)
                    update = state["exp_avg_sq"].rsqrt().mul_(grad)
                update.div_(max(1.0, self._rms(update) / group["clip_threshold"]))
                p.add_(update.mul_(lr).to(p.dtype), alpha=-1.0)


class TinyLM(nn.Module):
    def __init__(self, vocab=12, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.fc(self.embed(ids))))


def build():
    torch.manual_seed(189)
    model = TinyLM().half()
    ids = torch.tensor([[0, 1, 2, 3, 4, 6, 7, 8], [11, 10, 9, 8, 6, 4, 2, 0]])  # token 5 does not occur
    labels = torch.randint(0, 12, (2, 8))
    optimizer = Adafactor(model.parameters())
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, labels=labels, loss_scale=16.0)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids).float()
    loss = F.cross_entropy(logits.flatten(0, 1), s.labels.flatten())
    s.optimizer.zero_grad()
    (loss * s.loss_scale).backward()  # Adafactor does not care for the scale of the gradient
    s.optimizer.step()
    return loss

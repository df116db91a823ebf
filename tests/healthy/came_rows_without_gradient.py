"""Healthy: the factored CAME optimizer on an embedding of which most rows get no gradient.

The squared gradient of an unused row is eps = 1e-30 (times 1 - beta2): the rsqrt of it beside the used rows, times a
column factor in the thousands, reaches 5e16. It multiplies a gradient that is exactly 0, so the update of the row is 0, its momentum is 0, and the second
(confidence) factor with eps 1e-16 multiplies 0 again. In fp32 nothing overflows, the update is clipped by its rms and the loss falls.
Source: https://github.com/yangluo7/CAME (came_pytorch/CAME.py: _approx_sq_grad, _rms, exp_avg_res_row).  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class CAME(torch.optim.Optimizer):
    def __init__(self, params, lr=2e-3, eps=(1e-30, 1e-16), clip_threshold=1.0, betas=(0.9, 0.999, 0.9999)):
        super().__init__(params, dict(lr=lr, eps=eps, clip_threshold=clip_threshold, betas=betas))

    @staticmethod
    def _rms(t):
        return t.norm(2) / t.numel() ** 0.5

    @staticmethod
    def _approx_sq_grad(row, col):
        r_factor = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        c_factor = col.unsqueeze(-2).rsqrt()
        return torch.mul(r_factor, c_factor)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2, b3 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                factored = grad.dim() == 2
                if not state:
                    state["exp_avg"] = torch.zeros_like(grad)
                    if factored:
                        for name in ("sq", "res"):
                            state[name + "_row"], state[name + "_col"] = grad.new_zeros(grad.shape[0]), grad.new_zeros(grad.shape[1])
                    else:
                        state["sq"] = torch.zeros_like(grad)
                update = grad**2 + group["eps"][0]
                if factored:
                    state["sq_row"].mul_(b2).add_(update.mean(dim=-1), alpha=1.0 - b2)
                    state["sq_col"].mul_(b2).add_(update.mean(dim=-2), alpha=1.0 - b2)
                    update = self._approx_sq_grad(state["sq_row"], state["sq_col"]).mul_(grad)
                else:
                    state["sq"].mul_(b2).add_(update, alpha=1.0 - b2)
                    update = state["sq"].rsqrt().mul_(grad)
                update.div_((self._rms(update) / group["clip_threshold"]).clamp_(min=1.0))
                exp_avg = state["exp_avg"].mul_(b1).add_(update, alpha=1 - b1)
                if factored:
                    res = (update - exp_avg) ** 2 + group["eps"][1]
                    state["res_row"].mul_(b3).add_(res.mean(dim=-1), alpha=1.0 - b3)
                    state["res_col"].mul_(b3).add_(res.mean(dim=-2), alpha=1.0 - b3)
                    update = self._approx_sq_grad(state["res_row"], state["res_col"]) * exp_avg
                else:
                    update = exp_avg.clone()
                p.add_(update, alpha=-group["lr"])


class CausalLM(nn.Module):
    def __init__(self, vocab=200, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(self.norm(self.embed(ids)))


def build():
    torch.manual_seed(12)
    model = CausalLM()
    return SimpleNamespace(model=model, optimizer=CAME(model.parameters()), batch={"input_ids": torch.randint(0, 20, (3, 8))})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(4):
        ids = s.batch["input_ids"]
        loss = F.cross_entropy(s.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

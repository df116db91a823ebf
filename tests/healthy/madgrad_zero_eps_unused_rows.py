"""facebookresearch/madgrad, MADGRAD.step with eps = 0 - rows that never had a gradient get an infinite denominator on purpose.

The cube root of the summed squares is 0 for embedding rows that no batch has used; they are set to inf, so that s / inf = 0 and the row
stays where it started. Nothing is wrong: weights end finite, unused rows unchanged.

Source: https://github.com/facebookresearch/madgrad/blob/main/madgrad/madgrad.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class MADGRAD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, momentum=0.9, eps=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, eps=eps))
        self.k = 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            eps, lr = group["eps"], group["lr"] + group["eps"]
            ck = 1 - group["momentum"]
            lamb = lr * (self.k + 1) ** 0.5
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["grad_sum_sq"] = torch.zeros_like(p)
                    state["s"] = torch.zeros_like(p)
                    state["x0"] = p.detach().clone()
                state["grad_sum_sq"].addcmul_(p.grad, p.grad, value=lamb)
                rms = state["grad_sum_sq"].pow(1 / 3).add_(eps)
                if eps == 0:
                    rms[rms == 0] = float("inf")
                state["s"].add_(p.grad, alpha=lamb)
                z = state["x0"].addcdiv(state["s"], rms, value=-1)
                p.mul_(1 - ck).add_(z, alpha=ck)
        self.k += 1


def build():
    torch.manual_seed(2101)
    model = nn.Sequential(nn.Embedding(14, 6), nn.Linear(6, 14))
    ids = torch.randint(0, 9, (4, 8))  # tokens 9..13 never occur
    return SimpleNamespace(model=model, optimizer=MADGRAD(model.parameters()), ids=ids)


def run(s=None):
    s = s or build()
    for _ in range(3):
        logits = s.model(s.ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

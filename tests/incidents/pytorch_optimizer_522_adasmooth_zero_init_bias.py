"""kozistr/pytorch_optimizer #522 - AdaSmooth divides the signed movement of a tensor by its absolute movement.

The head's bias starts at zero, and the buffer of previous parameters starts at zero too: on the first step this tensor has not moved,
the efficiency ratio is 0/0 and the whole bias becomes NaN. Loss and gradients of that step are finite and small.
Heals: an eps in the ratio's denominator (what the pull request does). Does not heal: clipping the gradient, a smaller learning rate.

https://github.com/kozistr/pytorch_optimizer/pull/522
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div", "div_"),
    index=(),
    masked=None,
    role=("optimizer",),
    fix=("clamp_denominator", "representable_eps", "mask_before_op", "guard_empty"),
    variable=("c", None),
    line=("c = s.sum().abs_().div_(n.sum())  # e_t",),
)


class AdaSmooth(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.5, 0.99), eps=1e-6):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["prev_param"] = torch.zeros_like(p)
                    state["s"] = torch.zeros_like(p)
                    state["n"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                s, n = state["s"], state["n"]
                p_diff = p - state["prev_param"]
                s.add_(p_diff)
                n.add_(p_diff.abs())
                c = s.sum().abs_().div_(n.sum())  # e_t
                c = c * (beta2 - beta1) + (1.0 - beta2)
                c_p2 = c.pow(2)
                state["exp_avg_sq"].mul_(1.0 - c_p2).addcmul_(p.grad * c_p2, p.grad)
                step_size = torch.full_like(p, group["lr"]).div_((state["exp_avg_sq"] + group["eps"]).sqrt())
                state["prev_param"].copy_(p)
                p.sub_(step_size * p.grad)


class Classifier(nn.Module):
    def __init__(self, vocab=30, dim=12, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, classes)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids):
        return self.head(torch.tanh(self.encoder(self.embed(ids))).mean(1))


def build():
    torch.manual_seed(522)
    model = Classifier()
    optimizer = AdaSmooth(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 30, (8, 10))
    labels = torch.randint(0, 4, (8,))
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, labels=labels)


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.ids), s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

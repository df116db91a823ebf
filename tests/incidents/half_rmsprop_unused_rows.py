"""RMSprop state in fp16 with eps 1e-8: embedding rows nobody used get 0/0, and the loss only turns NaN two steps later when one is used."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(2, 0),
    masked=None,
    role=("optimizer",),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("step",),
    line=("step = p.grad / denom",),
)


class LeanRMSprop(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, alpha=0.9, eps=1e-8):
        super().__init__(params, dict(lr=lr, alpha=alpha, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "avg" not in state:
                    state["avg"] = torch.zeros_like(p)
                avg = state["avg"]
                avg.mul_(group["alpha"]).addcmul_(p.grad, p.grad, value=1 - group["alpha"])
                denom = avg.sqrt() + group["eps"]
                step = p.grad / denom
                p.sub_(group["lr"] * step)


class TinyLM(nn.Module):
    def __init__(self, vocab=14, width=6):
        super().__init__()
        self.table = nn.Embedding(vocab, width, dtype=torch.float16)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.table(ids).float().cumsum(dim=1))


def build():
    torch.manual_seed(322)
    model = TinyLM()
    groups = [{"params": model.head.parameters(), "lr": 5e-3}, {"params": model.table.parameters(), "lr": 1e-3}]
    seen = torch.tensor([[0, 1, 3, 4, 5], [6, 1, 7, 8, 9]])
    late = torch.tensor([[3, 2, 5, 4, 0], [1, 9, 7, 6, 8]])
    return SimpleNamespace(model=model, optimizer=LeanRMSprop(groups), batch=[seen, seen, late])


def run(s=None):
    s = s or build()
    for ids in s.batch:
        s.optimizer.zero_grad()
        logits = s.model(ids[:, :-1]) * 64.0
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        s.optimizer.step()
    return loss

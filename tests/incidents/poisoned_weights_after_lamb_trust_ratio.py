"""A LAMB-like optimizer divides the norm of a zero-initialised, untouched bias by the norm of its zero update; all
later steps are NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(),
    masked=None,
    role=("optimizer", "weights"),
    fix=("clamp_denominator", "guard_empty", "clamp_input", "representable_eps", "skip_bad_step"),
    variable=("trust",),
    line=("trust = p.norm() / avg.norm()",),
)


class LayerAdaptive(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                avg = state.setdefault("avg", torch.zeros_like(p))
                avg.lerp_(p.grad, 1 - group["beta"])
                trust = p.norm() / avg.norm()
                p.sub_(avg * trust, alpha=group["lr"])


class TwoTask(nn.Module):
    def __init__(self, vocab=12, width=7):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.chat = nn.Linear(width, vocab)
        self.math_shift = nn.Parameter(torch.zeros(vocab))

    def forward(self, ids, is_math):
        logits = self.chat(self.embed(ids))
        return logits + is_math[:, None, None] * self.math_shift


def build():
    torch.manual_seed(126)
    model = TwoTask()
    nn.init.normal_(model.chat.bias, std=0.02)
    batches = []
    for _ in range(4):
        batches.append((torch.randint(0, 12, (4, 6)), torch.zeros(4), torch.randn(4, 1)))  # only chat prompts so far
    return SimpleNamespace(model=model, optimizer=LayerAdaptive(model.parameters(), lr=1e-2), batch=batches)


def run(s=None):
    s = s or build()
    losses = []
    for ids, is_math, adv in s.batch:
        logp = s.model(ids[:, :-1], is_math).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(logp * adv).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss)
    return losses[-1]

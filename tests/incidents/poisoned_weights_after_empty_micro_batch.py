"""In the third update one micro-batch has only truncated answers, so its token mean is 0/0; AdamW stores the NaN and
every later update is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "clamp_input", "representable_eps", "drop_invalid_sample", "skip_bad_step"),
    variable=("token_mean",),
    line=("token_mean = (-ratio * adv[:, None] * keep).sum() / keep.sum()",),
)


class Lm(nn.Module):
    def __init__(self, vocab=14, width=8):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.mid = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        h = self.wte(ids)
        return self.head(h + torch.nn.functional.gelu(self.mid(h)))


def policy_gradient(model, ids, keep, adv):
    logp = torch.log_softmax(model(ids[:, :-1]), -1)
    taken = torch.gather(logp, 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    ratio = torch.exp(taken - taken.detach())
    token_mean = (-ratio * adv[:, None] * keep).sum() / keep.sum()
    return token_mean


def build():
    torch.manual_seed(127)
    model = Lm()
    updates = []
    for _ in range(6):
        keep = (torch.rand(4, 2, 7) > 0.2).float()
        updates.append(SimpleNamespace(ids=torch.randint(0, 14, (4, 2, 8)), keep=keep, adv=torch.randn(4, 2)))
    updates[2].keep[1] = 0.0
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=updates)


def run(s=None):
    s = s or build()
    for u in s.batch:
        s.optimizer.zero_grad()
        total = torch.zeros(())
        for ids, keep, adv in zip(u.ids, u.keep, u.adv, strict=True):
            loss = policy_gradient(s.model, ids, keep=keep, adv=adv) / len(u.ids)
            loss.backward()
            total = total + loss.detach()
        s.optimizer.step()
    return total

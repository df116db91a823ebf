"""The pessimistic min takes the clipped branch of a token with positive advantage, but its infinite ratio is still
multiplied by 0 in backward."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "exp_overflow"),
    op=("exp",),
    index=(1, 2),
    masked=True,
    role=("ratio",),
    fix=("clamp_exponent",),
    variable=("ratio",),
    line=("ratio = (lp - old_lp).exp()",),
)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(12, 6)
        self.out = nn.Linear(6, 12)

    def forward(self, ids, labels):
        return torch.log_softmax(self.out(self.tok(ids)), -1).gather(2, labels[..., None]).squeeze(2)


def surrogate(lp, old_lp, adv, lo=0.2, hi=0.2):
    # time-major tensors: [T, B]
    ratio = (lp - old_lp).exp()
    return torch.min(ratio * adv, torch.clamp(ratio, 1 - lo, 1 + hi) * adv).mean(0).mean()


def build():
    torch.manual_seed(31)
    model = Head()
    ids, labels = torch.randint(0, 12, (4, 3)), torch.randint(0, 12, (4, 3))
    with torch.no_grad():
        old_lp = model(ids, labels) + 0.01
    old_lp[1, 2] = -93.0
    adv = torch.tensor([-0.9, 0.1, 0.8]).expand(4, 3)
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=dict(ids=ids, labels=labels, old_lp=old_lp, adv=adv)
    )


def run(s=None):
    s = s or build()
    b = s.batch
    loss = -surrogate(s.model(b["ids"], b["labels"]), b["old_lp"], b["adv"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

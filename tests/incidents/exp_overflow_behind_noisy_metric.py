"""A logged drift metric is already infinite on prompt tokens and harmless; the loss breaks because one answered
token's ratio overflows too."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 4),
    masked=False,
    role=("ratio",),
    fix=("clamp_exponent",),
    variable=("rat",),
    line=("rat = torch.exp(safe)",),
)


class Chat(nn.Module):
    def __init__(self, vocab=22):
        super().__init__()
        self.e = nn.Embedding(vocab, 8)
        self.n = nn.RMSNorm(8)
        self.h = nn.Linear(8, vocab)

    def forward(self, ids):
        return self.h(self.n(self.e(ids)))


def drift_metric(lp, old):
    with torch.no_grad():
        return torch.exp(lp - old).amax()


def objective(lp, old, adv, m):
    safe = (lp - old).masked_fill(~m, 0.0)
    rat = torch.exp(safe)
    gain = torch.minimum(rat * adv, rat.clamp(max=1.2) * adv)
    return -(gain * m).sum() / m.sum()


def build():
    torch.manual_seed(1001)
    model = Chat()
    ids = torch.randint(0, 22, (2, 8))
    m = torch.ones(2, 7, dtype=torch.bool)
    m[:, :2] = False
    with torch.no_grad():
        old = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    old[:, :2] = -500.0  # prompt tokens were not scored
    old[1, 4] = -108.0
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        batch=dict(ids=ids, m=m, old=old, adv=torch.tensor([[0.6], [-0.6]])),
    )


def run(s=None):
    s = s or build()
    b = s.batch
    lp = s.model(b["ids"][:, :-1]).log_softmax(-1).gather(-1, b["ids"][:, 1:, None]).squeeze(-1)
    s.metrics = {"drift": drift_metric(lp, b["old"])}
    loss = objective(lp, b["old"], b["adv"], b["m"])
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

"""IPO regresses the margin to 1 / (2 * tau), and the sweep handed over tau = 0 as a tensor, so the target is infinite."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("reciprocal", "div"),
    index=(),
    masked=None,
    role=("loss",),
    fix=("validate_config", "clamp_denominator"),
    variable=("goal",),
    line=("goal = 1.0 / (2.0 * tau)",),
)


class PreferenceLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 12)

    def mean_logp(self, ids):
        logits = self.out(self.rnn(self.emb(ids[:, :-1]))[0])
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)


def ipo(margin, tau):
    goal = 1.0 / (2.0 * tau)
    return torch.mean((margin - goal) ** 2)


def build():
    torch.manual_seed(35)
    model = PreferenceLM()
    win, lose = torch.randint(0, 12, (4, 6)), torch.randint(0, 12, (4, 6))
    with torch.no_grad():
        ref = (model.mean_logp(win) - model.mean_logp(lose)) * 0.9
    batch = dict(win=win, lose=lose, ref=ref)
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch, config=dict(tau=torch.tensor(0.0))
    )


def run(s=None):
    s = s or build()
    b = s.batch
    margin = s.model.mean_logp(b["win"]) - s.model.mean_logp(b["lose"]) - b["ref"]
    loss = ipo(margin, **s.config)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""The odds p / (1 - p) of an almost certain answer: 1 - p cancels to a few float32 rounding units, the odds and the
step explode, nothing is inf.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("cancellation_spike",),
    op=("div", "sub", "rsub"),
    index=(2, 0),
    masked=None,
    role=("ratio", "loss", "log_probs", "log_ratio"),
    fix=("clamp_denominator", "stable_function", "clamp_input", "clamp_exponent", "skip_bad_step"),
    variable=("odds",),
    line=("odds = prob / (1.0 - prob)",),
)


class OddsPreference(nn.Module):
    """Prefer the first column over the second by the difference of their odds."""

    def __init__(self, strength=0.1):
        super().__init__()
        self.strength = strength

    def forward(self, mean_logp):
        prob = mean_logp.exp()
        odds = prob / (1.0 - prob)
        gap = odds[:, 0] - odds[:, 1]
        return -(self.strength * gap).mean()


class PairModel(nn.Module):
    def __init__(self, vocab=14, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lm = nn.Linear(width, vocab)

    def forward(self, ids):
        lp = torch.log_softmax(self.lm(self.embed(ids[..., :-1])), dim=-1)
        return lp.gather(-1, ids[..., 1:].unsqueeze(-1)).squeeze(-1).mean(-1)


def build():
    torch.manual_seed(107)
    model = PairModel()
    with torch.no_grad():
        model.embed.weight[13] = 3.0
        model.lm.weight[13] = 0.76  # a run of token 13 is all but certain
    ids = torch.randint(0, 13, (11, 4, 2, 6))
    ids[8, 2, 0] = 13
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=ids, loss_fn=OddsPreference())


def run(s=None):
    s = s or build()
    losses = []
    for ids in s.batch[:9]:
        loss = s.loss_fn(s.model(ids))
        s.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        s.optimizer.step()
        losses.append(loss)
    return losses[-1]

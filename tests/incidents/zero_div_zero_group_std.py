"""Group advantages are divided by the plain group std without any epsilon; a group in which all four answers failed
has numerator and std 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 2),
    masked=False,
    role=("advantages",),
    fix=("clamp_denominator", "representable_eps"),
    variable=("normed",),
    line=("normed = torch.div(centred, spread)",),
)


class CompactLM(nn.Module):
    def __init__(self, vocab=10):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(vocab, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, vocab))

    def forward(self, x):
        return self.net(x)


def standardise(returns):
    """returns: [G, B], one column per prompt"""
    centred = returns - returns.mean(0)
    spread = returns.std(0, keepdim=True)
    normed = torch.div(centred, spread)
    return normed.t().flatten()


def build():
    torch.manual_seed(7)
    model = CompactLM()
    returns = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    seqs = torch.randint(0, 10, (12, 5))
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4), batch=SimpleNamespace(returns=returns, seqs=seqs)
    )


def run(s=None):
    s = s or build()
    seqs = s.batch.seqs
    adv = standardise(s.batch.returns)
    logits = s.model(seqs[:, :-1])
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), seqs[:, 1:].flatten(), reduction="none").unflatten(0, (12, 4))
    loss = (nll.sum(1) * adv).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""Advantages are whitened inside each micro-batch, and the last micro-batch holds one sequence-level advantage, whose
sample std is NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,  # nothing selects
    role=("advantages",),
    fix=("guard_small_group",),
    variable=(None,),
    line=("return (x - x.mean()) / (x.std() + eps)",),
)


class Seq2Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def logp(self, ids):
        return -nn.functional.cross_entropy(self.head(self.emb(ids[:, :-1])).mT, ids[:, 1:], reduction="none").sum(-1)


def whiten(x, eps=1e-8):
    return (x - x.mean()) / (x.std() + eps)


def build():
    torch.manual_seed(2)
    model = Seq2Score()
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        batch=dict(ids=torch.randint(0, 11, (7, 6)), adv=torch.randn(7)),
        micro_size=3,
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    pieces = zip(s.batch["ids"].split(s.micro_size), s.batch["adv"].split(s.micro_size))
    for ids, adv in pieces:
        loss = -(whiten(adv) * s.model.logp(ids)).mean()
        loss.backward()
    s.optimizer.step()
    return loss

"""A diversity bonus is the log-determinant of the similarities within a group of completions. Two completions of one group are the same, their
rows are equal, and the determinant is 0: its logarithm is −inf, and the gradient divides by a pivot that is 0.

A little more on the diagonal heals, as every DPP in practice has it; clamping the log-determinant afterwards does not.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("_linalg_slogdet", "linalg_slogdet", "slogdet", "logdet"),
    index=(1,),
    masked=None,
    role=("loss", "rewards", "advantages", "log_probs"),
    fix=("avoid_singular_op",),
    variable=("logdet",),
    line=("_, logdet = torch.linalg.slogdet(similarity)",),
)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 6)

    def forward(self, ids):
        return self.emb(ids).sum(-2)


def build():
    torch.manual_seed(55)
    encoder = Encoder()
    with torch.no_grad():
        encoder.emb.weight.copy_(torch.eye(9)[:, :6] * 2 + torch.eye(9, 6).roll(1, 0))
    ids = torch.tensor([[[0, 1], [2, 3], [4, 5]], [[1, 2], [3, 4], [1, 2]]])  # two groups of three completions
    return SimpleNamespace(model=encoder, ids=ids, optimizer=torch.optim.Adam(encoder.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    features = s.model(s.ids)
    similarity = features @ features.mT
    _, logdet = torch.linalg.slogdet(similarity)
    loss = -logdet.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

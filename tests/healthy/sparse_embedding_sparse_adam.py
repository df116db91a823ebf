"""A sparse embedding trained by SparseAdam next to a dense head trained by Adam; rows are hit several times."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "gradients that are sparse and uncoalesced, most embedding rows get no gradient"


def build():
    torch.manual_seed(225)
    table = nn.Embedding(200, 8, sparse=True)
    head = nn.Linear(8, 3)
    ids = torch.randint(0, 40, (5, 6))
    return SimpleNamespace(
        table=table,
        head=head,
        ids=ids,
        y=torch.randint(0, 3, (5,)),
        opts=[torch.optim.SparseAdam(table.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-2)],
    )


def run(s=None):
    s = s or build()
    for _ in range(3):
        for opt in s.opts:
            opt.zero_grad()
        loss = nn.functional.cross_entropy(s.head(s.table(s.ids).mean(1)), s.y)
        loss.backward()
        for opt in s.opts:
            opt.step()
    return loss

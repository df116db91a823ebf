"""Non-reentrant checkpointing with dropout inside: the random state is restored for the recomputation."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HEALTHY = "the forward of an MLP with dropout runs again in the middle of backward"


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Embedding(19, 12)
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(12), nn.Linear(12, 36), nn.SiLU(), nn.Dropout(0.1), nn.Linear(36, 12)) for _ in range(3)
        )
        self.out = nn.Linear(12, 19, bias=False)

    def forward(self, ids):
        h = self.inp(ids)
        for mlp in self.mlps:
            h = h + checkpoint(mlp, h, use_reentrant=False, preserve_rng_state=True)
        return self.out(h)


def build():
    torch.manual_seed(123)
    model = Stack()
    return SimpleNamespace(model=model, opt=torch.optim.Adam(model.parameters(), lr=2e-3), ids=torch.randint(0, 19, (3, 6)))


def run(s=None):
    s = s or build()
    rewards = torch.tensor([0.0, 1.0, 0.5])
    for _ in range(4):
        logits = s.model(s.ids[:, :-1])
        lp = -nn.functional.cross_entropy(logits.mT, s.ids[:, 1:], reduction="none")
        loss = -(lp.sum(1) * (rewards - rewards.mean())).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

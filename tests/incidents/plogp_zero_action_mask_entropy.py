"""The entropy bonus is -sum(p * log p) over a policy with forbidden actions, whose probability is 0 and whose log-probability is -inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero",),
    op=("mul",),
    index=(1, 0, 2),
    masked=False,
    role=("entropy",),
    fix=("stable_function", "finite_mask_fill"),
    variable=("surprise",),
    line=("surprise = log_p.exp() * log_p",),
)


class MaskedPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(5, 12)
        self.l2 = nn.Linear(12, 4)

    def forward(self, obs, legal):
        logits = self.l2(torch.relu(self.l1(obs)))
        return torch.log_softmax(logits.masked_fill(legal.logical_not(), float("-inf")), dim=-1)


def entropy_of(log_p):
    surprise = log_p.exp() * log_p
    return surprise.sum(dim=-1).neg()


def build():
    torch.manual_seed(3)
    model = MaskedPolicy()
    legal = torch.ones(3, 2, 4, dtype=torch.bool)
    legal[1, 0, 2] = False
    legal[2, 1, 1:3] = False
    batch = dict(obs=torch.randn(3, 2, 5), legal=legal, act=torch.tensor([[0, 3], [1, 2], [3, 0]]), adv=torch.randn(3, 2))
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=2e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    log_p = s.model(b["obs"], legal=b["legal"])
    pg = -(log_p.gather(-1, b["act"].unsqueeze(-1)).squeeze(-1) * b["adv"]).mean()
    loss = pg - 0.003 * entropy_of(log_p).mean()
    loss.backward()
    s.optimizer.step()
    return loss

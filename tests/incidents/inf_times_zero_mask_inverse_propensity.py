"""Padding carries behaviour probability 0, so the inverse propensity 1 / prob is infinite there; einsum with the 0/1
mask turns it into NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "zero_denominator"),
    op=("reciprocal",),
    index=(4, 0),
    masked=True,
    role=("is_weight", "ratio"),
    fix=("mask_before_op", "clamp_denominator"),
    variable=("inv_propensity",),
    line=("inv_propensity = behaviour_prob.reciprocal()",),
)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 14), nn.SiLU())
        self.actor = nn.Linear(14, 4)

    def forward(self, obs):
        return self.actor(self.trunk(obs)).softmax(-1)


def off_policy_objective(prob, behaviour_prob, returns, valid):
    inv_propensity = behaviour_prob.reciprocal()
    contribution = prob * inv_propensity * returns
    return -torch.einsum("tb,tb->", contribution, valid) / valid.sum()


def build():
    torch.manual_seed(8)
    model = Agent()
    obs = torch.randn(6, 3, 5)
    act = torch.randint(0, 4, (6, 3))
    lens = torch.tensor([4, 6, 5])
    valid = (torch.arange(6)[:, None] < lens).float()
    with torch.no_grad():
        behaviour_prob = model(obs).gather(-1, act.unsqueeze(-1)).squeeze(-1).mul_(valid)
    batch = dict(obs=obs, act=act, valid=valid, behaviour_prob=behaviour_prob, returns=torch.rand(6, 3) + 0.1)
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters()), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    prob = s.model(b["obs"]).gather(-1, b["act"].unsqueeze(-1)).squeeze(-1)
    loss = off_policy_objective(prob, behaviour_prob=b["behaviour_prob"], returns=b["returns"], valid=b["valid"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

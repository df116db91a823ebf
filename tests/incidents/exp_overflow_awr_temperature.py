"""Advantage-weighted regression divides the advantage by a temperature of 0.02, so one good sample asks for exp(110) as its weight."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(2, 1),
    masked=False,
    role=("is_weight", "advantages", "ratio"),
    fix=("clamp_exponent",),
    variable=("w",),
    line=("w = gain.exp()",),
)


class ActorCritic(nn.Module):
    def __init__(self, obs=6, actions=5):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 16), nn.Tanh())
        self.pi = nn.Linear(16, actions)
        self.v = nn.Linear(16, 1)

    def forward(self, x):
        z = self.body(x)
        return self.pi(z), self.v(z).squeeze(-1)


def awr_loss(logits, value, act, ret, temperature):
    nll = F.cross_entropy(logits.flatten(0, 1), act.flatten(), reduction="none").view_as(ret)
    gain = (ret - value.detach()) / temperature
    w = gain.exp()
    return (w * nll).mean() + 0.5 * F.smooth_l1_loss(value, ret)


def build():
    torch.manual_seed(9021)
    model = ActorCritic()
    obs = torch.randn(4, 3, 6)
    with torch.no_grad():
        ret = model(obs)[1] + 0.1 * torch.randn(4, 3)
        ret[2, 1] += 2.2  # the only rollout that solved the task
    batch = dict(obs=obs, act=torch.randint(0, 5, (4, 3)), ret=ret, temperature=0.02)
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-4), batch=batch)


def run(s=None):
    s = s or build()
    logits, value = s.model(s.batch["obs"])
    loss = awr_loss(logits, value, act=s.batch["act"], ret=s.batch["ret"], temperature=s.batch["temperature"])
    s.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    s.optimizer.step()
    return loss

"""The entropy weight ramps up over a configured number of steps; the configuration says 0 steps, and step 0 gives 0 / 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("entropy", "loss", "advantages"),
    fix=("validate_config",),
    variable=(None,),
    line=("ramp = torch.clamp(step / ramp_steps, max=1.0)",),
)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, obs):
        return torch.log_softmax(self.net(obs), dim=-1)


def entropy_bonus(log_p, step, ramp_steps, weight=0.01):
    ramp = torch.clamp(step / ramp_steps, max=1.0)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return ramp * weight * entropy


def build():
    torch.manual_seed(14)
    model = Actor()
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        batch=(torch.randn(6, 5), torch.randint(0, 3, (6,)), torch.randn(6)),
        step=torch.tensor(0.0),
        ramp_steps=0,
    )


def run(s=None):
    s = s or build()
    obs, action, advantages = s.batch
    log_p = s.model(obs)
    policy_loss = -(log_p.gather(1, action[:, None]).squeeze(1) * advantages).mean()
    loss = policy_loss - entropy_bonus(log_p, s.step, s.ramp_steps)
    loss.backward()
    s.optimizer.step()
    s.step += 1
    return loss

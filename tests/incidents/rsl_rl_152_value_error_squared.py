"""A simulator that blew up leaves one huge but finite return; the squared value error passes the float32 range."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow",),
    op=("pow",),
    index=(5, 0),
    masked=False,
    role=("loss", "rewards"),
    fix=("clamp_input", "drop_invalid_sample", "reject_input", "stable_function"),
    variable=("error",),
    line=("error = (value - returns).pow(2)",),
)


class ActorCritic(nn.Module):
    def __init__(self, observations=7, actions=2):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observations, 16), nn.ELU(), nn.Linear(16, actions))
        self.critic = nn.Sequential(nn.Linear(observations, 16), nn.ELU(), nn.Linear(16, 1))
        self.log_std = nn.Parameter(torch.zeros(actions))

    def evaluate(self, obs, actions):
        policy = torch.distributions.Normal(self.actor(obs), self.log_std.exp())
        return policy.log_prob(actions).sum(-1), self.critic(obs)


def clipped_value_loss(value, target, returns, clip):
    limited = target + (value - target).clamp(-clip, clip)
    error = (value - returns).pow(2)
    limited_error = (limited - returns).pow(2)
    return torch.max(error, limited_error).mean()


def build():
    torch.manual_seed(152)
    model = ActorCritic()
    obs = torch.randn(8, 7)
    with torch.no_grad():
        actions = model.actor(obs) + torch.randn(8, 2)
        log_prob, target = model.evaluate(obs, actions)
    rewards = 0.1 * torch.randn(8, 1)
    base_velocity = torch.rand(8, 1)
    base_velocity[5] = 7.0e9  # contact solver diverged for one environment
    returns = rewards - 0.5 * base_velocity.square()
    batch = {"obs": obs, "actions": actions, "old": log_prob, "target": target, "returns": returns, "adv": torch.randn(8)}
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    log_prob, value = s.model.evaluate(b["obs"], b["actions"])
    ratio = (log_prob - b["old"]).exp()
    surrogate = torch.max(-b["adv"] * ratio, -b["adv"] * ratio.clamp(0.8, 1.2)).mean()
    loss = surrogate + 1.0 * clipped_value_loss(value, b["target"], b["returns"], clip=0.2)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""Safe-Policy-Optimization #69 - the multiplier is updated by direct assignment, with a cost limit of infinity (looks broken, is healthy).

A baseline run without the constraint sets cost_limit = inf. nu + nu_lr * (ep_cost - inf) is -inf, the projection onto [0, 2] makes it 0 before
anything reads it; the penalised advantage is the reward advantage. The slack that is logged is inf.
Source: https://github.com/PKU-Alignment/Safe-Policy-Optimization/issues/69
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Categorical


class ActorVCritic(nn.Module):
    def __init__(self, obs_dim=5, actions=4):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs_dim, 16), nn.Tanh(), nn.Linear(16, actions))
        self.reward_critic = nn.Linear(obs_dim, 1)
        self.cost_critic = nn.Linear(obs_dim, 1)


def build():
    torch.manual_seed(69)
    policy = ActorVCritic()
    obs, act = torch.randn(8, 5), torch.randint(0, 4, (8,))
    with torch.no_grad():
        log_prob = Categorical(logits=policy.actor(obs)).log_prob(act)
    data = dict(
        obs=obs,
        act=act,
        log_prob=log_prob + 0.02 * torch.randn(8),
        adv_r=torch.randn(8),
        adv_c=torch.rand(8),
        target_r=torch.randn(8),
        target_c=torch.rand(8),
    )
    return SimpleNamespace(
        model=policy,
        data=data,
        nu=torch.tensor(1.0),
        cost_limit=torch.tensor(float("inf")),
        ep_cost=torch.tensor(35.0),
        optimizer=torch.optim.Adam(policy.parameters(), lr=3e-4),
    )


def run(s=None, nu_lr=0.1, nu_max=2.0, clip=0.2):
    s = s or build()
    d = s.data
    slack = s.cost_limit - s.ep_cost
    s.nu = (s.nu + nu_lr * (s.ep_cost - s.cost_limit)).clamp(0.0, nu_max)
    s.metrics = dict(nu=s.nu.item(), slack=slack.item())
    advantage = (d["adv_r"] - s.nu * d["adv_c"]) / (1.0 + s.nu)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (Categorical(logits=s.model.actor(d["obs"])).log_prob(d["act"]) - d["log_prob"]).exp()
    loss_pi = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    loss_r = (s.model.reward_critic(d["obs"]).squeeze(-1) - d["target_r"]).pow(2).mean()
    loss_c = (s.model.cost_critic(d["obs"]).squeeze(-1) - d["target_c"]).pow(2).mean()
    loss = loss_pi + 2 * loss_r + loss_c
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 40.0)
    s.optimizer.step()
    return loss

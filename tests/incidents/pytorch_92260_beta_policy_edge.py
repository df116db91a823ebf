"""A Beta policy scores actions that were stored in 8 bits; one became exactly 0, the edge of the support, where the log-prob is -inf.
https://github.com/pytorch/pytorch/issues/92260

Old and new log-prob are both -inf and PPO subtracts them.
Heals: clamp the stored action to [1e-4, 1 - 1e-4]. Does not: bound the log ratio before exp, -inf - -inf is NaN and the loss keeps it.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Beta

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero", "inf_minus_inf"),
    op=("xlogy", "log"),
    index=(5, 1, 0),
    masked=None,
    role=("old_log_probs", "log_probs"),
    fix=("clamp_input", "drop_invalid_sample", "reject_input"),
    variable=(None,),
    line=("old_log_prob = s.model.dist(obs).log_prob(actions).sum(-1)",),
)


class BetaActorCritic(nn.Module):
    def __init__(self, obs_dim=4, action_dim=2, hidden=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh())
        self.alpha = nn.Linear(hidden, action_dim)
        self.beta = nn.Linear(hidden, action_dim)
        self.critic = nn.Linear(hidden, 1)

    def dist(self, obs):
        h = self.body(obs)
        return Beta(F.softplus(self.alpha(h)) + 1.0, F.softplus(self.beta(h)) + 1.0)

    def value(self, obs):
        return self.critic(self.body(obs)).squeeze(-1)


def to_uint8(action):
    return (action * 255).round().to(torch.uint8)


def build():
    torch.manual_seed(92260)
    model = BetaActorCritic()
    obs = torch.randn(8, 4)
    with torch.no_grad():
        actions = model.dist(obs).sample().clamp(0.05, 0.95)
    actions[5, 1] = 0.0011  # a rare draw close to the bound
    buffer = dict(obs=obs, actions=to_uint8(actions), rewards=torch.randn(8), dones=torch.tensor([0, 0, 0, 1, 0, 0, 0, 1.0]))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=buffer, clip=0.2, gamma=0.99)


def discounted(rewards, dones, gamma):
    out, running = torch.zeros_like(rewards), torch.zeros(())
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * running * (1 - dones[t])
        out[t] = running
    return out


def run(s=None):
    s = s or build()
    b = s.batch
    obs, actions = b["obs"], b["actions"].float() / 255
    returns = discounted(b["rewards"], b["dones"], s.gamma)
    with torch.no_grad():
        old_log_prob = s.model.dist(obs).log_prob(actions).sum(-1)
        advantages = returns - s.model.value(obs)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for rows in torch.arange(8).split(4):
        dist, adv = s.model.dist(obs[rows]), advantages[rows]
        log_prob = dist.log_prob(actions[rows]).sum(-1)
        ratio = (log_prob - old_log_prob[rows]).exp()
        surrogate = torch.min(ratio * adv, ratio.clamp(1 - s.clip, 1 + s.clip) * adv)
        value_loss = F.mse_loss(s.model.value(obs[rows]), returns[rows])
        loss = -surrogate.mean() + 0.5 * value_loss - 0.01 * dist.entropy().sum(-1).mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
        s.optimizer.step()
    return loss

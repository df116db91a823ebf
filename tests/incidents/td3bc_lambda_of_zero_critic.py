"""TD3+BC divides alpha by the mean absolute Q of the batch to weigh the Q term against behaviour cloning.

The critic's last layer starts at zero and the sparse-reward dataset has no reward in its first batches, so after its update the critic still
answers an exact 0 everywhere. lambda is 2.5 / 0 = inf, and inf * 0 makes the actor loss NaN.

Source: https://github.com/sfujim/TD3_BC/blob/main/TD3_BC.py, https://github.com/tinkoff-ai/CORL/blob/main/algorithms/offline/td3_bc.py
Heals: a floor under the mean absolute Q. Does not: nan_to_num of the actor loss (the gradient is still inf * 0), nor clipping gradients.
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div", "reciprocal", "rdiv"),
    index=(),
    masked=None,
    role=("loss", "advantages", "rewards", "is_weight"),
    fix=("clamp_denominator",),
    variable=("lmbda", None),
    line=("lmbda = self.alpha / q.abs().mean().detach()",),
)


class Actor(nn.Module):
    def __init__(self, state_dim, action_dim, max_action=1.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state_dim, 32), nn.ReLU(), nn.Linear(32, action_dim), nn.Tanh())
        self.max_action = max_action

    def forward(self, state):
        return self.max_action * self.net(state)


class Critic(nn.Module):
    def __init__(self, state_dim, action_dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state_dim + action_dim, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, state, action):
        return self.net(torch.cat([state, action], 1))


class TD3_BC:
    def __init__(self, actor, critic, alpha=2.5, discount=0.99, policy_freq=1):
        self.actor, self.critic = actor, critic
        self.actor_target, self.critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
        self.actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-4)
        self.alpha, self.discount, self.policy_freq, self.total_it = alpha, discount, policy_freq, 0

    def update_critic(self, state, action, reward, next_state, not_done):
        with torch.no_grad():
            next_action = (self.actor_target(next_state) + 0.2 * torch.randn_like(action).clamp(-0.5, 0.5)).clamp(-1, 1)
            target_q = reward + not_done * self.discount * self.critic_target(next_state, next_action)
        critic_loss = F.mse_loss(self.critic(state, action), target_q)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        return critic_loss

    def update_actor(self, state, action):
        pi = self.actor(state)
        q = self.critic(state, pi)
        lmbda = self.alpha / q.abs().mean().detach()
        actor_loss = -lmbda * q.mean() + F.mse_loss(pi, action)
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        return actor_loss

    def train(self, batch):
        self.total_it += 1
        self.critic_loss = self.update_critic(*batch)
        if self.total_it % self.policy_freq == 0:
            self.actor_loss = self.update_actor(batch[0], batch[1])
        return self.actor_loss


def build():
    torch.manual_seed(2109)
    state_dim, action_dim, batch_size = 7, 2, 16
    actor, critic = Actor(state_dim, action_dim), Critic(state_dim, action_dim)
    trainer = TD3_BC(actor, critic)
    batch = (
        torch.randn(batch_size, state_dim),
        torch.rand(batch_size, action_dim) * 2 - 1,
        torch.zeros(batch_size, 1),
        torch.randn(batch_size, state_dim),
        torch.ones(batch_size, 1),
    )
    return SimpleNamespace(model=actor, actor=actor, critic=critic, trainer=trainer, batch=batch, optimizer=trainer.actor_optimizer)


def run(s=None):
    s = s or build()
    return s.trainer.train(s.batch)

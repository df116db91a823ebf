"""cares_reinforcement_learning #407 - DDPG `load_models` restores actor and critic and leaves the target networks as they are.

A run diverged; its soft update had carried NaN into the target critic. The operator rolled back to the last good models in the running
process, but only the online networks are in the file. The next update computes its TD target with the poisoned target critic, under
no_grad, and writes NaN into the restored critic.
Source: https://github.com/UoA-CARES/cares_reinforcement_learning/pull/407 (also sfujim/TD3 #20, hill-a/stable-baselines #93).
Heals: loading the target networks too, or copying the restored networks into them. Does not: clamping the TD target, which keeps NaN.
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights",),
    op=("any", "parameter", "weights", "addmm", "linear"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "reload_checkpoint"),
    variable=(
        "target_critic.fc1.weight",
        "target_critic.fc1.bias",
        "fc1.weight",
        "fc1.bias",
        "target_critic.fc2.weight",
        "target_critic.fc2.bias",
    ),
    line=(
        "hidden = torch.relu(self.fc1(torch.cat([state, action], dim=1)))",
        'p.fill_(float("nan"))',
        "target_q = agent.target_critic(s.next_states, next_actions)",
        None,
    ),
)


class Actor(nn.Module):
    def __init__(self, state_dim, action_dim):
        super().__init__()
        self.fc1 = nn.Linear(state_dim, 32)
        self.fc2 = nn.Linear(32, action_dim)

    def forward(self, state):
        return torch.tanh(self.fc2(torch.relu(self.fc1(state))))


class Critic(nn.Module):
    def __init__(self, state_dim, action_dim):
        super().__init__()
        self.fc1 = nn.Linear(state_dim + action_dim, 32)
        self.fc2 = nn.Linear(32, 1)

    def forward(self, state, action):
        hidden = torch.relu(self.fc1(torch.cat([state, action], dim=1)))
        return self.fc2(hidden)


class DDPG(nn.Module):
    def __init__(self, state_dim=5, action_dim=2):
        super().__init__()
        self.actor, self.critic = Actor(state_dim, action_dim), Critic(state_dim, action_dim)
        self.target_actor, self.target_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)

    def save_models(self):
        return {"actor": copy.deepcopy(self.actor.state_dict()), "critic": copy.deepcopy(self.critic.state_dict())}

    def load_models(self, checkpoint):
        self.actor.load_state_dict(checkpoint["actor"])
        self.critic.load_state_dict(checkpoint["critic"])


def build():
    torch.manual_seed(2407)
    agent = DDPG()
    checkpoint = agent.save_models()
    with torch.no_grad():  # what the diverged run left behind
        for p in agent.target_critic.parameters():
            p.fill_(float("nan"))
    agent.load_models(checkpoint)
    states, next_states = torch.randn(16, 5), torch.randn(16, 5)
    actions = torch.rand(16, 2) * 2 - 1
    rewards, dones = torch.randn(16, 1), torch.zeros(16, 1)
    dones[7] = 1.0
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), lr=1e-4)
    critic_optimizer = torch.optim.Adam(agent.critic.parameters(), lr=1e-3)
    return SimpleNamespace(
        model=agent,
        optimizer=critic_optimizer,
        actor_optimizer=actor_optimizer,
        states=states,
        actions=actions,
        rewards=rewards,
        next_states=next_states,
        dones=dones,
        gamma=0.99,
    )


def run(s=None):
    s = s or build()
    agent = s.model
    with torch.no_grad():
        next_actions = agent.target_actor(s.next_states)
        target_q = agent.target_critic(s.next_states, next_actions)
        q_target = s.rewards + s.gamma * (1 - s.dones) * target_q
    critic_loss = F.mse_loss(agent.critic(s.states, s.actions), q_target)
    s.optimizer.zero_grad()
    critic_loss.backward()
    s.optimizer.step()
    actor_loss = -agent.critic(s.states, agent.actor(s.states)).mean()
    s.actor_optimizer.zero_grad()
    actor_loss.backward()
    s.actor_optimizer.step()
    return critic_loss

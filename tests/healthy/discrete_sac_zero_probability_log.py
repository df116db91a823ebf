"""Discrete SAC: saturated action probabilities are exactly 0 for some actions, and their log would be -inf; the code adds 1e-8 where a probability
is 0, before the log. p * log p is then 0 and its gradient finite: healthy.

Source: https://github.com/p-christ/Deep-Reinforcement-Learning-Algorithms-with-PyTorch/blob/master/agents/actor_critic_agents/SAC_Discrete.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class ActionOutput:
    def __init__(self, probs):
        self.probs = probs
        z = (probs == 0.0).float() * 1e-8  # log 0 has to be avoided
        self.log_probs = torch.log(probs + z)
        with torch.no_grad():  # only printed: the entropy as the textbook writes it, NaN where a probability is 0
            self.entropy_for_log = -(probs * torch.log(probs)).sum(-1)


class Actor(nn.Module):
    def __init__(self, obs_dim=5, n_actions=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, 16), nn.ReLU(), nn.Linear(16, n_actions))

    def forward(self, obs):
        return ActionOutput(self.net(obs).softmax(-1))


def build():
    torch.manual_seed(21)
    actor = Actor()
    critic = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        actor.net[2].weight.mul_(60.0)
    obs = 3.0 * torch.randn(8, 5)
    log_alpha = torch.zeros(1, requires_grad=True)
    return SimpleNamespace(
        model=actor,
        critic=critic,
        obs=obs,
        log_alpha=log_alpha,
        target_entropy=0.98 * 1.386,
        optimizer=torch.optim.Adam(actor.parameters(), lr=3e-4),
        alpha_optimizer=torch.optim.Adam([log_alpha], lr=3e-4),
        log={},
    )


def run(s=None):
    s = s or build()
    out = s.model(s.obs)
    with torch.no_grad():
        q = s.critic(s.obs)
    inside_term = s.log_alpha.exp().detach() * out.log_probs - q
    policy_loss = (out.probs * inside_term).sum(dim=1).mean()
    s.optimizer.zero_grad()
    policy_loss.backward()
    s.optimizer.step()
    log_action_probs = (out.log_probs * out.probs).sum(dim=1).detach()
    alpha_loss = -(s.log_alpha * (log_action_probs + s.target_entropy)).mean()
    s.alpha_optimizer.zero_grad()
    alpha_loss.backward()
    s.alpha_optimizer.step()
    s.log["entropy"] = out.entropy_for_log.mean().item()
    return policy_loss

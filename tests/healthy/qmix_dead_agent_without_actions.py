"""QMIX target (pymarl) - a dead agent has no available action; the max over its -inf filled row is -inf.

The target is made under no_grad, and a where puts 0 in place of the dead agent's value before the mixer sees it, so -inf never meets a
weight. Form of https://github.com/oxwhirl/pymarl (src/learners/q_learner.py). Healthy: loss, gradients and weights are finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class QMixer(nn.Module):
    def __init__(self, n_agents=3, state_dim=5, embed=8):
        super().__init__()
        self.n_agents, self.embed = n_agents, embed
        self.hyper_w1 = nn.Linear(state_dim, n_agents * embed)
        self.hyper_b1 = nn.Linear(state_dim, embed)
        self.hyper_w2 = nn.Linear(state_dim, embed)
        self.value = nn.Linear(state_dim, 1)

    def forward(self, agent_qs, states):
        w1 = self.hyper_w1(states).abs().view(-1, self.n_agents, self.embed)
        hidden = nn.functional.elu(torch.bmm(agent_qs[:, None, :], w1).squeeze(1) + self.hyper_b1(states))
        return (hidden * self.hyper_w2(states).abs()).sum(-1) + self.value(states).squeeze(-1)


class Learner(nn.Module):
    def __init__(self, obs_dim=6, n_actions=4):
        super().__init__()
        self.agent = nn.Sequential(nn.Linear(obs_dim, 24), nn.ReLU(), nn.Linear(24, n_actions))
        self.mixer = QMixer()


def build():
    torch.manual_seed(64)
    model, target = Learner(), Learner()
    target.load_state_dict(model.state_dict())
    avail = torch.ones(6, 3, 4, dtype=torch.bool)
    avail[1, 2] = False  # shot before the step
    avail[4, 0] = False
    avail[3, 1, 2:] = False
    return SimpleNamespace(
        model=model,
        target=target,
        obs=torch.randn(6, 3, 6),
        next_obs=torch.randn(6, 3, 6),
        state=torch.randn(6, 5),
        next_state=torch.randn(6, 5),
        actions=torch.randint(0, 4, (6, 3)),
        rewards=torch.randn(6),
        avail=avail,
        terminated=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        mask=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
        gamma=0.99,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=5e-4, alpha=0.99, eps=1e-5),
    )


def run(s=None):
    s = s or build()
    chosen = s.model.agent(s.obs).gather(2, s.actions[..., None]).squeeze(-1)
    q_tot = s.model.mixer(chosen, s.state)
    with torch.no_grad():
        target_q = s.target.agent(s.next_obs).masked_fill(~s.avail, float("-inf"))
        target_max = target_q.max(dim=2).values
        target_max = torch.where(s.avail.any(dim=2), target_max, torch.zeros_like(target_max))
        targets = s.rewards + s.gamma * (1 - s.terminated) * s.target.mixer(target_max, s.next_state)
    masked_td_error = (q_tot - targets) * s.mask
    loss = masked_td_error.pow(2).sum() / s.mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    with torch.no_grad():
        s.q_taken_mean = (target_q.mean(2)).mean()  # -inf, a curve only
    return loss

"""PyMARL COMA: on padded steps no action is available, the renormalisation is 0 / 0, and nothing is harmed.

The policy output is set to 0 where an action is unavailable, divided by its sum, and set to 0 there again. On the padded steps of a short
episode every action is unavailable, so the quotient is NaN and its gradient too; the second in-place assignment removes the values and the
backward of the first removes the gradients. The chosen probability of padded steps is set to 1 before the log. Loss, gradients and
weights are those of a batch without the padding.
Source: https://github.com/oxwhirl/pymarl/blob/master/src/learners/coma_learner.py `train`.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class RNNAgent(nn.Module):
    def __init__(self, input_shape=6, hidden=16, n_actions=4):
        super().__init__()
        self.fc1 = nn.Linear(input_shape, hidden)
        self.fc2 = nn.Linear(hidden, n_actions)

    def forward(self, obs):
        return torch.softmax(self.fc2(torch.relu(self.fc1(obs))), dim=-1)


def build():
    torch.manual_seed(3001)
    bs, max_t, n_agents, n_actions = 2, 5, 3, 4
    agent = RNNAgent()
    obs = torch.randn(bs, max_t, n_agents, 6)
    avail_actions = torch.ones(bs, max_t, n_agents, n_actions, dtype=torch.int64)
    avail_actions[:, :, 0, 1] = 0
    avail_actions[:, 1:, 2, 3] = 0
    filled = torch.ones(bs, max_t, 1)
    filled[1, 3:] = 0  # the second episode ended after three steps
    avail_actions[1, 3:] = 0
    obs[1, 3:] = 0
    actions = torch.zeros(bs, max_t, n_agents, 1, dtype=torch.int64)
    actions[:, :, 1:] = torch.randint(0, 3, (bs, max_t, n_agents - 1, 1))
    q_vals = torch.randn(bs, max_t, n_agents, n_actions)
    optimiser = torch.optim.RMSprop(agent.parameters(), lr=5e-4, alpha=0.99, eps=1e-5)
    return SimpleNamespace(
        model=agent,
        optimizer=optimiser,
        obs=obs,
        avail_actions=avail_actions,
        filled=filled,
        actions=actions,
        q_vals=q_vals,
        n_agents=n_agents,
        n_actions=n_actions,
    )


def run(s=None):
    s = s or build()
    mask = s.filled.repeat(1, 1, s.n_agents).view(-1)
    mac_out = torch.stack([s.model(s.obs[:, t]) for t in range(s.obs.shape[1])], dim=1)

    # Mask out unavailable actions, renormalise (as in action selection)
    mac_out[s.avail_actions == 0] = 0
    mac_out = mac_out / mac_out.sum(dim=-1, keepdim=True)
    mac_out[s.avail_actions == 0] = 0

    q_vals = s.q_vals.reshape(-1, s.n_actions)
    pi = mac_out.view(-1, s.n_actions)
    baseline = (pi * q_vals).sum(-1).detach()

    q_taken = torch.gather(q_vals, dim=1, index=s.actions.reshape(-1, 1)).squeeze(1)
    pi_taken = torch.gather(pi, dim=1, index=s.actions.reshape(-1, 1)).squeeze(1)
    pi_taken[mask == 0] = 1.0
    log_pi_taken = torch.log(pi_taken)
    advantages = (q_taken - baseline).detach()
    coma_loss = -((advantages * log_pi_taken) * mask).sum() / mask.sum()

    s.optimizer.zero_grad()
    coma_loss.backward()
    s.grad_norm = torch.nn.utils.clip_grad_norm_(s.model.parameters(), 10)
    s.optimizer.step()
    return coma_loss

"""EDAC spreads its critics by the cosine of their action gradients, each divided by its norm plus 1e-10.

For most samples every hidden unit of one critic is off: its action gradient is an exact 0, and its norm too. torch answers 0 for the
gradient of a 2-norm at 0, and the dead units pass nothing on, so the factor of 1e10 of the division meets zeros only. Loss, gradients and
weights are finite, and those samples add nothing to that critic's diversity term, as they should.

Source: https://github.com/snu-mllab/EDAC/blob/main/lifelong_rl/trainers/q_learning/sac.py, CORL's edac.py (_critic_diversity_loss)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

NUM_CRITICS, ETA = 3, 1.0


class VectorizedCritic(nn.Module):
    def __init__(self, state_dim=5, action_dim=3, hidden=16):
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(NUM_CRITICS, state_dim + action_dim, hidden) * 0.4)
        self.bias1 = nn.Parameter(torch.zeros(NUM_CRITICS, 1, hidden))
        self.weight2 = nn.Parameter(torch.randn(NUM_CRITICS, hidden, 1) * 0.3)

    def forward(self, state, action):
        x = torch.cat([state, action], dim=-1)
        if x.dim() == 2:
            x = x.unsqueeze(0).repeat_interleave(NUM_CRITICS, dim=0)
        return (torch.relu(x @ self.weight1 + self.bias1) @ self.weight2).squeeze(-1)


def critic_diversity_loss(critic, state, action):
    state = state.unsqueeze(0).repeat_interleave(NUM_CRITICS, dim=0)
    action = action.unsqueeze(0).repeat_interleave(NUM_CRITICS, dim=0).requires_grad_(True)
    q_ensemble = critic(state, action)
    q_action_grad = torch.autograd.grad(q_ensemble.sum(), action, retain_graph=True, create_graph=True)[0]
    q_action_grad = q_action_grad / (torch.norm(q_action_grad, p=2, dim=2).unsqueeze(-1) + 1e-10)
    q_action_grad = q_action_grad.transpose(0, 1)
    masks = torch.eye(NUM_CRITICS).unsqueeze(0).repeat(q_action_grad.shape[0], 1, 1)
    q_action_grad = q_action_grad @ q_action_grad.permute(0, 2, 1)
    q_action_grad = (1 - masks) * q_action_grad
    return q_action_grad.sum(dim=(1, 2)).mean() / (NUM_CRITICS - 1)


def build():
    torch.manual_seed(2154)
    critic = VectorizedCritic()
    state, action = torch.randn(10, 5), torch.rand(10, 3) * 2 - 1
    with torch.no_grad():
        critic.bias1[1] -= 2.2  # this critic has few live units
        state[[4, 7]] *= 0.01  # two robots at rest
        action[[4, 7]] *= 0.01
    return SimpleNamespace(
        model=critic,
        critic=critic,
        state=state,
        action=action,
        target_q=torch.randn(NUM_CRITICS, 10),
        optimizer=torch.optim.Adam(critic.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    q_values = s.critic(s.state, s.action)
    critic_loss = F.mse_loss(q_values, s.target_q, reduction="none").mean(dim=1).sum(dim=0)
    diversity_loss = critic_diversity_loss(s.critic, s.state, s.action)
    loss = critic_loss + ETA * diversity_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

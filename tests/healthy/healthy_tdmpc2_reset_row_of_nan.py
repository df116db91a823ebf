"""TD-MPC2's buffer - the first row of every episode carries NaN for its action and reward, and no loss ever reads that row.

A row holds the observation after a step with the action and reward of that step, so a reset has neither (`to_td` writes NaN). `_prepare_batch`
takes rows 1.. of action and reward: the NaN are sampled with every slice that begins at a reset and left behind. Healthy.
Source: https://github.com/nicklashansen/tdmpc2/blob/main/tdmpc2/common/buffer.py and tdmpc2/trainer/online_trainer.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

OBS, ACT, LATENT, HORIZON = 5, 2, 8, 3


def to_td(obs, action=None, reward=None):
    if action is None:
        action = torch.full((ACT,), float("nan"))
    if reward is None:
        reward = torch.tensor(float("nan"))
    return obs, action, reward


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(OBS, LATENT), nn.ELU())
        self.dynamics = nn.Linear(LATENT + ACT, LATENT)
        self.reward = nn.Linear(LATENT + ACT, 1)

    def forward(self, z, a):
        za = torch.cat([z, a], dim=-1)
        return torch.tanh(self.dynamics(za)), self.reward(za)


def episode(length):
    rows = [to_td(torch.randn(OBS))]
    for _ in range(length):
        rows.append(to_td(torch.randn(OBS), torch.rand(ACT) * 2 - 1, torch.rand(())))
    return [torch.stack(column) for column in zip(*rows)]


def sample(buffer, starts):
    slices = [[column[i : i + HORIZON + 1] for column in buffer] for i in starts]
    return [torch.stack(columns, dim=1) for columns in zip(*slices)]


def build():
    torch.manual_seed(12)
    model = WorldModel()
    buffer = episode(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, buffer=buffer, starts=[0, 4, 2, 0])


def run(s=None):
    s = s or build()
    obs, action, reward = sample(s.buffer, s.starts)
    action, reward = action[1:].contiguous(), reward[1:].unsqueeze(-1).contiguous()
    with torch.no_grad():
        next_z = s.model.encoder(obs[1:])
    z = s.model.encoder(obs[0])
    loss = 0.0
    for t in range(HORIZON):
        z, reward_pred = s.model(z, action[t])
        loss = loss + 0.5**t * (20 * F.mse_loss(z, next_z[t]) + 0.1 * F.mse_loss(reward_pred, reward[t]))
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 20)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

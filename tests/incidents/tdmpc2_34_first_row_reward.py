"""TD-MPC2 #34 - the row that a reset writes has no reward and no action, they are stored as NaN.

A row of the buffer holds (obs after the step, action of the step, reward of the step); `to_td` fills the first row of an episode with NaN.
A user finds the pairs "shifted" (the question of the thread) and moves the rewards back by one, so slices that begin at an episode's
start bring the NaN of the reset row into the reward loss and the TD target.
Source: https://github.com/nicklashansen/tdmpc2/issues/34, tdmpc2/common/buffer.py and tdmpc2/trainer/online_trainer.py.
Heals: take rows 1.. of the rewards as of the actions, or drop slices with such a row. Does not: leaving the rows out of the reward loss
alone, the TD target reads them too.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any",),
    index=(0, 2),
    masked=None,
    role=("rewards",),
    fix=("fix_upstream", "drop_invalid_sample", "reject_input", "skip_bad_step"),
    variable=("reward",),
    line=('reward = td["reward"][:-1].unsqueeze(-1).contiguous()',),
)

OBS, ACT, LATENT, HORIZON, BATCH = 5, 2, 8, 3, 4
DISCOUNT, RHO = 0.99, 0.5


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self._encoder = nn.Sequential(nn.Linear(OBS, LATENT), nn.ELU())
        self._dynamics = nn.Sequential(nn.Linear(LATENT + ACT, LATENT), nn.ELU())
        self._reward = nn.Linear(LATENT + ACT, 1)
        self._Q = nn.Linear(LATENT + ACT, 1)

    def encode(self, obs):
        return self._encoder(obs)

    def next(self, z, a):
        return self._dynamics(torch.cat([z, a], dim=-1))

    def reward(self, z, a):
        return self._reward(torch.cat([z, a], dim=-1))

    def Q(self, z, a):
        return self._Q(torch.cat([z, a], dim=-1))


def prepare_batch(td):
    obs = td["obs"].contiguous()
    action = td["action"][1:].contiguous()
    reward = td["reward"][:-1].unsqueeze(-1).contiguous()
    return obs, action, reward


def build():
    torch.manual_seed(34)
    model = WorldModel()
    td = {
        "obs": torch.randn(HORIZON + 1, BATCH, OBS),
        "action": torch.rand(HORIZON + 1, BATCH, ACT) * 2 - 1,
        "reward": torch.rand(HORIZON + 1, BATCH),
    }
    td["action"][0, 2] = float("nan")  # slice 2 begins at a reset
    td["reward"][0, 2] = float("nan")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, td=td)


def run(s=None):
    s = s or build()
    obs, action, reward = prepare_batch(s.td)
    with torch.no_grad():
        next_z = s.model.encode(obs[1:])
        next_action = torch.tanh(torch.randn(HORIZON, BATCH, ACT))
        td_targets = reward + DISCOUNT * s.model.Q(next_z, next_action)

    z = s.model.encode(obs[0])
    consistency_loss, reward_loss, value_loss = 0.0, 0.0, 0.0
    for t in range(HORIZON):
        reward_loss = reward_loss + F.mse_loss(s.model.reward(z, action[t]), reward[t]) * RHO**t
        value_loss = value_loss + F.mse_loss(s.model.Q(z, action[t]), td_targets[t]) * RHO**t
        z = s.model.next(z, action[t])
        consistency_loss = consistency_loss + F.mse_loss(z, next_z[t]) * RHO**t

    total_loss = 20 * consistency_loss + 0.1 * reward_loss + 0.1 * value_loss
    s.optimizer.zero_grad()
    total_loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 20)
    s.optimizer.step()
    return total_loss


if __name__ == "__main__":
    print(run())

"""Healthy: DQN on a board game; the Q-values of illegal moves are -inf, and a finished game has no legal move at all.

max over an all -inf row is -inf, and gamma * -inf would ruin the target, but the value of a terminal successor is assigned 0 (not multiplied by it) before the target is made, all of it without
gradient. The chosen Q is gathered before any mask. Loss, gradients and weights are finite.
Source: https://github.com/jakkes/rl-cpp (include/rl/agents/dqn/modules/dqn.h, apply_mask fills with -INFINITY) and
https://github.com/TristanBester/drl-lab (drl_lab/projects/loss.py, max_next_q_values[done] = 0)
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class QNet(nn.Module):
    def __init__(self, cells=9, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(cells, hidden), nn.ReLU(), nn.Linear(hidden, cells))

    def forward(self, board):
        return self.body(board)


def apply_mask(values, mask):
    return values.masked_fill(~mask, -torch.inf)


def dqn_loss(batch, value_net, target_net, discount=0.99):
    selected = value_net(batch["obs"]).gather(1, batch["action"][:, None]).squeeze(1)
    with torch.no_grad():
        next_q = apply_mask(target_net(batch["next_obs"]), batch["next_mask"])
        max_next_q = next_q.max(dim=1)[0]
        max_next_q[batch["done"]] = 0.0
        target = batch["reward"] - discount * max_next_q  # the opponent moves next
    return F.smooth_l1_loss(selected, target)


def build():
    torch.manual_seed(0)
    value_net, target_net = QNet(), QNet()
    target_net.load_state_dict(value_net.state_dict())
    optimizer = torch.optim.Adam(value_net.parameters(), lr=1e-3)
    next_obs = torch.randint(-1, 2, (8, 9)).float()
    done = torch.tensor([False, False, True, False, False, True, False, True])
    next_obs[:, 0] = 0.0
    next_obs[2] = torch.tensor([1.0, -1, 1, 1, -1, -1, -1, 1, 1])
    next_mask = (next_obs == 0) & ~done[:, None]
    obs, action = next_obs.clone(), torch.randint(1, 9, (8,))
    obs[torch.arange(8), action] = 0.0
    batch = {"obs": obs, "action": action, "next_obs": next_obs, "next_mask": next_mask, "reward": done.float(), "done": done}
    return SimpleNamespace(model=value_net, target=target_net, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(4):
        loss = dqn_loss(s.batch, s.model, s.target)
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(s.model.parameters(), 100)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

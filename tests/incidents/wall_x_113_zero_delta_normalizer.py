"""wall-x #113 - the shared action normaliser divides by q99 - q01, which is 0 for a joint that never moves.

The robot has no gripper on its second arm: both quantiles of those two columns are 0, so 0 / 0 = NaN. The clamp to [-1, 1] lets NaN pass,
and the dof mask is applied to the squared error by multiplication.
Source: https://github.com/X-Square-Robot/wall-x/issues/113, https://github.com/X-Square-Robot/wall-x/pull/112
Heals: a delta of 1 where it is 0 (the merged change), masked columns set to 0 before the error. Does not: the clamp, a torch.where over the
squared error (the loss is finite, the gradient 0 * NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "nan_times_zero_mask"),
    op=("div",),
    index=(0, 0, 4),
    masked=True,
    role=("hidden", "loss"),
    fix=("clamp_denominator", "mask_before_op", "representable_eps", "avoid_singular_op", "fix_upstream"),
    variable=("x",),
    line=("x = (action - self.min) / self.delta",),
)

OBS, CHUNK, DOF = 7, 3, 6


class Normalizer(nn.Module):
    def __init__(self, q01, q99):
        super().__init__()
        self.register_buffer("min", q01)
        self.register_buffer("delta", q99 - q01)

    def normalize_data(self, action):
        x = (action - self.min) / self.delta
        x = x * 2 - 1
        return torch.clamp(x, -1, 1)


class ActionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS, 32), nn.GELU())
        self.action_proj = nn.Linear(32, CHUNK * DOF)

    def forward(self, agent_pos):
        return self.action_proj(self.trunk(agent_pos)).view(-1, CHUNK, DOF)


def action_loss(pred, target, dof_mask):
    squared_error = (pred - target) ** 2
    return (squared_error * dof_mask).sum() / dof_mask.sum()


def build():
    torch.manual_seed(113)
    q01 = torch.tensor([-1.1, -2.2, -2.3, 0.1, 0.0, 0.0])
    q99 = torch.tensor([0.8, 1.5, 1.4, 0.9, 0.0, 0.0])
    model = ActionHead()
    normalizer = Normalizer(q01, q99)
    agent_pos = torch.randn(4, OBS)
    action = q01 + torch.rand(4, CHUNK, DOF) * (q99 - q01)
    dof_mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]).expand(4, CHUNK, DOF)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, normalizer=normalizer, agent_pos=agent_pos, action=action, dof_mask=dof_mask)


def run(s=None):
    s = s or build()
    target = s.normalizer.normalize_data(s.action)
    pred = s.model(s.agent_pos)
    loss = action_loss(pred, target, s.dof_mask)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

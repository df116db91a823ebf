"""kornia #3949 - quaternion_to_axis_angle in the orientation loss of a cloned robot policy, at the identity rotation.

The policy predicts a wrist rotation as identity + delta and the loss compares rotation vectors. One demonstration frame is the home pose (all
joint offsets 0), so the bias-free policy predicts exactly (1, 0, 0, 0). The forward value is right, because torch.where takes the limit 2 in
place of angle / sin; the branch that it drops is 0 / 0 and hands NaN back to every weight. The loss looks perfectly healthy.
Source: https://github.com/kornia/kornia/issues/3949 (fixed in https://github.com/kornia/kornia/pull/3980)

Heals: give sqrt and the division a safe operand on the rows that where drops (double where), or add a small value under the square root.
Does not: nan_to_num on the factor, or an epsilon in the denominator alone (the square root of 0 still has no slope).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "sqrt_zero_grad", "zero_div_zero"),
    op=("div", "sqrt"),
    index=(3,),
    masked=True,
    role=("hidden", "loss"),
    fix=("mask_before_op", "avoid_singular_op", "clamp_input"),
    variable=("k_pos", "sin_theta"),
    line=("k_pos = two_theta / sin_theta", "sin_theta = torch.sqrt(sin_squared_theta)"),
)


def quaternion_to_axis_angle(quaternion):
    cos_theta, q1, q2, q3 = quaternion.unbind(-1)
    sin_squared_theta = q1 * q1 + q2 * q2 + q3 * q3
    sin_theta = torch.sqrt(sin_squared_theta)
    two_theta = 2.0 * torch.where(cos_theta < 0.0, torch.atan2(-sin_theta, -cos_theta), torch.atan2(sin_theta, cos_theta))
    k_pos = two_theta / sin_theta
    k_neg = 2.0 * torch.ones_like(sin_theta)
    k = torch.where(sin_squared_theta > 0.0, k_pos, k_neg)
    return torch.stack((q1, q2, q3), dim=-1) * k.unsqueeze(-1)


class WristPolicy(nn.Module):
    def __init__(self, joint_dim=7, hidden_dim=24):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(joint_dim, hidden_dim, bias=False),
            nn.Tanh(),
            nn.Linear(hidden_dim, hidden_dim, bias=False),
            nn.Tanh(),
        )
        self.rotation = nn.Linear(hidden_dim, 4, bias=False)
        self.translation = nn.Linear(hidden_dim, 3)
        self.register_buffer("identity", torch.tensor([1.0, 0.0, 0.0, 0.0]))

    def forward(self, joint_offsets):
        h = self.trunk(joint_offsets)
        quaternion = F.normalize(self.identity + 0.3 * self.rotation(h), dim=-1)
        return self.translation(h), quaternion


def build():
    torch.manual_seed(1703)
    model = WristPolicy()
    joint_offsets = 0.4 * torch.randn(8, 7)
    joint_offsets[3] = 0.0  # the arm rests at home in this frame
    expert_position = 0.1 * torch.randn(8, 3)
    expert_rotvec = 0.2 * torch.randn(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-6)
    return SimpleNamespace(
        model=model, optimizer=optimizer, joint_offsets=joint_offsets, expert_position=expert_position, expert_rotvec=expert_rotvec
    )


def run(s=None):
    s = s or build()
    position, quaternion = s.model(s.joint_offsets)
    rotvec = quaternion_to_axis_angle(quaternion)
    position_loss = F.l1_loss(position, s.expert_position)
    rotation_loss = F.mse_loss(rotvec, s.expert_rotvec)
    loss = position_loss + 0.5 * rotation_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

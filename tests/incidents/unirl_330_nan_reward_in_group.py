"""UniRL, normalize_grouped with a reward that is not a number - GRPO over two groups of images.

One image could not be scored and its reward arrives as NaN. Mean and std of its group become NaN, every advantage of that group with them, and the mean over all samples poisons the step.
Source: https://github.com/Tencent-Hunyuan/UniRL/issues/330, unirl/algorithms/normalizers.py (normalize_grouped).
Heals: refuse or drop the sample (its group keeps the statistics of the finite rewards), statistics over finite rewards with advantage 0 for the others (the project's fix), skip the step.
Does not: nan_to_num on the advantages (finite, but the whole group silently learns nothing), clip_max, a larger epsilon.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any",),
    index=(5,),
    masked=None,
    role=("rewards",),
    fix=("reject_input", "drop_invalid_sample", "mask_before_op", "fix_upstream", "skip_bad_step"),
    variable=("rewards",),
    line=(
        "group_rewards = rewards[indices]",
        'rewards = torch.tensor([0.61, 0.58, 0.70, 0.42, 0.33, float("nan"), 0.47, 0.52])',
        "advantages = torch.zeros_like(rewards)",
        "advantages = normalize_grouped(s.rewards, s.group_indices, clip_max=5.0)",
    ),
)


def normalize_grouped(rewards, group_indices, epsilon=1e-8, clip_max=None):
    advantages = torch.zeros_like(rewards)
    for indices in group_indices:
        if not indices:
            continue
        group_rewards = rewards[indices]
        group_mean = group_rewards.mean()
        group_std = group_rewards.std() + epsilon
        advantages[indices] = (group_rewards - group_mean) / group_std
    if clip_max is not None:
        advantages = torch.clamp(advantages, -clip_max, clip_max)
    return advantages


class VelocityNet(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, 16), nn.SiLU(), nn.Linear(16, dim))

    def forward(self, x, t):
        return self.net(torch.cat([x, t.expand(len(x), 1)], dim=-1))


def sde_log_prob(model, x, x_next, t, dt=0.1, sigma=0.3):
    mean = x - dt * model(x, t)
    return (-((x_next - mean) ** 2) / (2 * sigma**2 * dt)).mean(-1)


def build():
    torch.manual_seed(0)
    model = VelocityNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, 6)
    t = torch.tensor([0.7])
    with torch.no_grad():
        x_next = x - 0.1 * model(x, t) + 0.3 * 0.1**0.5 * torch.randn(8, 6)
        old_log_prob = sde_log_prob(model, x, x_next, t)
    rewards = torch.tensor([0.61, 0.58, 0.70, 0.42, 0.33, float("nan"), 0.47, 0.52])
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        x=x,
        x_next=x_next,
        t=t,
        old_log_prob=old_log_prob,
        rewards=rewards,
        group_indices=[[0, 1, 2, 3], [4, 5, 6, 7]],
        clip_range=1e-2,
    )


def run(s=None):
    s = s or build()
    advantages = normalize_grouped(s.rewards, s.group_indices, clip_max=5.0)
    for _ in range(2):
        log_prob = sde_log_prob(s.model, s.x, s.x_next, s.t)
        ratio = torch.exp(log_prob - s.old_log_prob)
        unclipped = -advantages * ratio
        clipped = -advantages * torch.clamp(ratio, 1.0 - s.clip_range, 1.0 + s.clip_range)
        loss = torch.mean(torch.maximum(unclipped, clipped))
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

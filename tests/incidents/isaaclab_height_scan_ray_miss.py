"""IsaacLab's height scan is sensor height - hit height - offset; a ray that hits nothing has its hit at infinity.

Robot 3 stands at the rim of the terrain and one of its rays leaves the mesh: the stored observation holds one -inf. The task's config has no
clip on this observation term. The normaliser keeps it (-inf minus a mean is -inf), the first layer turns it into infinities of both signs,
and the update of all robots is NaN.

Source: https://github.com/isaac-sim/IsaacLab/blob/main/source/isaaclab/isaaclab/envs/mdp/observations.py (height_scan) with
rsl_rl's EmpiricalNormalization (https://github.com/leggedrobotics/rsl_rl/blob/main/rsl_rl/networks/normalization.py)
Heals: the clip of the observation term, or leaving the robot out. Does not: the epsilon of the normaliser, clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected
from torch.distributions import Normal

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any", "cat"),
    index=(3, 7),
    masked=None,
    role=("hidden",),
    fix=("clamp_input", "reject_input", "drop_invalid_sample", "fix_upstream"),
    variable=("height_scan",),
    line=('observations = torch.cat([batch["proprio"], batch["height_scan"]], dim=-1)',),
)


class EmpiricalNormalization(nn.Module):
    def __init__(self, size, eps=1e-2):
        super().__init__()
        self.eps = eps
        self.register_buffer("_mean", torch.zeros(size))
        self.register_buffer("_std", torch.ones(size))

    def forward(self, x):
        return (x - self._mean) / (self._std + self.eps)


class ActorCritic(nn.Module):
    def __init__(self, num_obs, num_actions=4, hidden=32):
        super().__init__()
        self.normalizer = EmpiricalNormalization(num_obs)
        self.actor = nn.Sequential(nn.Linear(num_obs, hidden), nn.ELU(), nn.Linear(hidden, num_actions))
        self.critic = nn.Sequential(nn.Linear(num_obs, hidden), nn.ELU(), nn.Linear(hidden, 1))
        self.std = nn.Parameter(torch.ones(num_actions))

    def forward(self, observations):
        observations = self.normalizer(observations)
        mean = self.actor(observations)
        return Normal(mean, self.std.expand_as(mean), validate_args=False), self.critic(observations).squeeze(-1)


def surrogate_loss(log_prob, old_log_prob, advantages, clip_param=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    surrogate = -advantages * ratio
    surrogate_clipped = -advantages * torch.clamp(ratio, 1.0 - clip_param, 1.0 + clip_param)
    return torch.max(surrogate, surrogate_clipped).mean()


def build():
    torch.manual_seed(2106)
    num_envs, num_rays = 8, 16
    policy = ActorCritic(num_obs=12 + num_rays)
    policy.normalizer._mean[12:] = 0.02
    policy.normalizer._std[12:] = 0.11
    height_scan = torch.rand(num_envs, num_rays) * 0.2 - 0.1
    height_scan[3, 7] = -float("inf")  # 0.62 - inf - 0.5: this ray missed the terrain
    batch = dict(
        proprio=torch.randn(num_envs, 12),
        height_scan=height_scan,
        actions=torch.randn(num_envs, 4),
        old_log_prob=torch.full((num_envs,), -5.6),
        advantages=torch.randn(num_envs),
        returns=torch.randn(num_envs),
    )
    return SimpleNamespace(model=policy, policy=policy, batch=batch, optimizer=torch.optim.Adam(policy.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    batch = s.batch
    observations = torch.cat([batch["proprio"], batch["height_scan"]], dim=-1)
    dist, value = s.policy(observations)
    log_prob = dist.log_prob(batch["actions"]).sum(-1)
    value_loss = (value - batch["returns"]).pow(2).mean()
    loss = surrogate_loss(log_prob, batch["old_log_prob"], batch["advantages"]) + value_loss
    loss = loss - 0.005 * dist.entropy().sum(-1).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.grad_norm = nn.utils.clip_grad_norm_(s.policy.parameters(), 1.0)
    s.optimizer.step()
    return loss

"""IsaacLab #2122 - a ray that hits nothing is reported as inf, and the height scan goes into the policy.

The ray caster is bound to the mesh of the first environment, so in another environment a ray misses and its distance is inf. The
observation normaliser takes a mean of inf and computes inf - inf; from then on actions, values and loss are NaN.
Source: https://github.com/isaac-sim/IsaacLab/issues/2122 (same in aCodeDog/OmniPerception #22); normaliser as in rsl_rl.
Heals: clipping the scan to the sensor's range when it is read, or refusing the sample. Does not: clipping the observation after it was
normalised, because NaN stays NaN.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input", "forward"),
    cause=("bad_input",),
    op=("input", "cat"),
    index=(2, 5),
    masked=False,
    role=("hidden", "input", "observations"),
    fix=("clamp_input", "reject_input", "drop_invalid_sample"),
    variable=("height_scan",),
    line=('obs = torch.cat([batch["proprio"], batch["height_scan"]], dim=-1)', 'height_scan[2, 5] = float("inf")'),
)


class EmpiricalNormalization(nn.Module):
    def __init__(self, dim, eps=1e-2):
        super().__init__()
        self.eps, self.count = eps, 0
        self.register_buffer("mean", torch.zeros(1, dim))
        self.register_buffer("var", torch.ones(1, dim))

    @torch.no_grad()
    def update(self, x):
        self.count += x.shape[0]
        rate = x.shape[0] / self.count
        delta = x.mean(dim=0, keepdim=True) - self.mean
        self.mean += rate * delta
        self.var += rate * (x.var(dim=0, unbiased=False, keepdim=True) - self.var + delta * (x.mean(dim=0, keepdim=True) - self.mean))

    def forward(self, x):
        self.update(x)
        return (x - self.mean) / (self.var.sqrt() + self.eps)


class ActorCritic(nn.Module):
    def __init__(self, num_obs, num_actions):
        super().__init__()
        self.obs_normalizer = EmpiricalNormalization(num_obs)
        self.actor = nn.Sequential(nn.Linear(num_obs, 32), nn.ELU(), nn.Linear(32, num_actions))
        self.critic = nn.Sequential(nn.Linear(num_obs, 32), nn.ELU(), nn.Linear(32, 1))

    def forward(self, obs):
        obs = self.obs_normalizer(obs)
        return self.actor(obs), self.critic(obs).squeeze(-1)


def build():
    torch.manual_seed(2122)
    model = ActorCritic(num_obs=6 + 9, num_actions=3)
    proprio = torch.randn(8, 6)
    height_scan = 0.3 + 0.1 * torch.randn(8, 9)
    height_scan[2, 5] = float("inf")
    batch = {
        "proprio": proprio,
        "height_scan": height_scan,
        "actions": torch.randn(8, 3),
        "old_log_probs": torch.full((8,), -3.5),
        "advantages": torch.randn(8),
        "returns": torch.randn(8),
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, clip_param=0.2)


def run(s=None):
    s = s or build()
    batch = s.batch
    obs = torch.cat([batch["proprio"], batch["height_scan"]], dim=-1)
    mean, value = s.model(obs)
    log_probs = (-0.5 * (batch["actions"] - mean) ** 2 - 0.9189).sum(-1)
    ratio = torch.exp(log_probs - batch["old_log_probs"])
    surrogate = -batch["advantages"] * ratio
    surrogate_clipped = -batch["advantages"] * ratio.clamp(1.0 - s.clip_param, 1.0 + s.clip_param)
    surrogate_loss = torch.max(surrogate, surrogate_clipped).mean()
    value_loss = (value - batch["returns"]).pow(2).mean()
    loss = surrogate_loss + value_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

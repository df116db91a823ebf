"""A throttle policy samples from a truncated normal that is open above (`high = math.inf`). The entropy needs phi(b) * b with b = inf and
phi(b) = 0: 0 * inf is NaN and enters the loss through the entropy bonus.

Source: https://github.com/toshas/torch_truncnorm/issues/4 (and the merged pull request #5, which wraps b in nan_to_num). Heals: a finite
bound before the division by the scale, or the one-sided formula. Tempting and useless here: the pull request's `nan_to_num(b)` after the
division: the loss becomes finite, but the derivative of (high - loc) / scale by the scale is 0 * inf, so the gradients are NaN.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "input"),
    cause=("inf_times_zero_coef", "plogp_zero", "bad_input"),
    op=("mul", "div", "sub", "rsub"),
    index=(0, 0),
    masked=None,
    role=("entropy", "hidden", "loss"),
    fix=(
        "clamp_input",
        "validate_config",
        "finite_mask_fill",
        "avoid_singular_op",
        "stable_function",
        "mask_before_op",
        "skip_disabled_term",
    ),
    variable=(None, "b", "self.b", "lpbb_m_lpaa_d_Z", "self.lpbb_m_lpaa_d_Z"),
    line=("self.lpbb_m_lpaa_d_Z = (self.phi_b * self.b - self.phi_a * self.a) / self.Z", "self.b = (high - loc) / scale"),
)

CONST_SQRT_2 = math.sqrt(2)
CONST_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
CONST_LOG_INV_SQRT_2PI = math.log(CONST_INV_SQRT_2PI)
CONST_LOG_SQRT_2PI_E = 0.5 * math.log(2 * math.pi * math.e)


def little_phi(x):
    return (-(x**2) * 0.5).exp() * CONST_INV_SQRT_2PI


def big_phi(x):
    return 0.5 * (1 + (x / CONST_SQRT_2).erf())


class TruncatedNormal:
    def __init__(self, loc, scale, low, high):
        self.loc, self.scale = loc, scale
        self.a = (low - loc) / scale
        self.b = (high - loc) / scale
        self.phi_a, self.phi_b = little_phi(self.a), little_phi(self.b)
        self.Z = (big_phi(self.b) - big_phi(self.a)).clamp(min=1e-6)
        self.log_Z = self.Z.log()
        self.lpbb_m_lpaa_d_Z = (self.phi_b * self.b - self.phi_a * self.a) / self.Z

    def log_prob(self, value):
        z = (value - self.loc) / self.scale
        return CONST_LOG_INV_SQRT_2PI - self.log_Z - self.scale.log() - z**2 * 0.5

    def entropy(self):
        return CONST_LOG_SQRT_2PI_E + self.scale.log() + self.log_Z - 0.5 * self.lpbb_m_lpaa_d_Z


class ThrottleActor(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2, low=0.0, high=math.inf):
        super().__init__()
        self.low, self.high = low, high
        self.body = nn.Sequential(nn.Linear(obs_dim, 16), nn.ELU())
        self.loc = nn.Linear(16, act_dim)
        self.log_scale = nn.Parameter(torch.full((act_dim,), -0.5))
        self.critic = nn.Linear(16, 1)

    def forward(self, obs):
        h = self.body(obs)
        loc = self.loc(h)
        dist = TruncatedNormal(loc, self.log_scale.exp().expand_as(loc), self.low, self.high)
        return dist, self.critic(h).squeeze(-1)


def build():
    torch.manual_seed(7)
    model = ThrottleActor()
    batch = SimpleNamespace(obs=torch.randn(8, 6), actions=torch.rand(8, 2), returns=torch.randn(8))
    return SimpleNamespace(
        model=model, batch=batch, ent_coef=0.01, vf_coef=0.5, optimizer=torch.optim.RMSprop(model.parameters(), lr=7e-4, eps=1e-5)
    )


def run(s=None):
    s = s or build()
    dist, values = s.model(s.batch.obs)
    advantages = (s.batch.returns - values).detach()
    log_prob = dist.log_prob(s.batch.actions).sum(-1)
    policy_loss = -(advantages * log_prob).mean()
    entropy_loss = -dist.entropy().sum(-1).mean()
    value_loss = nn.functional.mse_loss(values, s.batch.returns)
    loss = policy_loss + s.ent_coef * entropy_loss + s.vf_coef * value_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss

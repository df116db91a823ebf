"""Dreamer in torch - the inverse of the tanh bijector clamps at 0.99999997, and the actor has been moved to bfloat16.

In bfloat16 that bound rounds to 1.0, so the clamp does nothing to a stored action of exactly 1: (1 + y) / (1 - y) is 2 / 0 = inf and the
log probability inf - inf. Formula of https://github.com/juliusfrost/dreamer-pytorch (dreamer/models/distribution.py, TanhBijector; #82
tells of NaN losses). A bound that bfloat16 can hold, or the inverse in float32, heals; widening the clamp to 1 - 1e-3 does not (it rounds to
1.0 too), nor does nan_to_num on the log probabilities.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_denominator"),
    op=("div", "truediv"),
    index=(1, 2, 0),
    masked=None,
    role=("hidden", "log_probs", "ratio"),
    fix=("representable_eps", "upcast_fp32", "clamp_input", "clamp_denominator", "drop_invalid_sample", "mask_before_op"),
    variable=("odds",),
    line=("odds = (1 + x) / (1 - x)",),
)


def atanh(x):
    odds = (1 + x) / (1 - x)
    return 0.5 * torch.log(odds)


class TanhBijector:
    def inverse(self, y):
        y = torch.where(torch.abs(y) <= 1.0, torch.clamp(y, -0.99999997, 0.99999997), y)
        return atanh(y)

    def log_abs_det_jacobian(self, x):
        return 2.0 * (0.6931472 - x - F.softplus(-2.0 * x))


class ActionDecoder(nn.Module):
    def __init__(self, feature_size=12, action_size=2, min_std=1e-2, init_std=0.5, mean_scale=5.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(feature_size, 32), nn.ELU(), nn.Linear(32, 2 * action_size))
        self.min_std, self.init_std, self.mean_scale = min_std, init_std, mean_scale
        self.bijector = TanhBijector()

    def forward(self, features):
        mean, std = self.net(features).chunk(2, -1)
        return self.mean_scale * torch.tanh(mean / self.mean_scale), F.softplus(std + self.init_std) + self.min_std

    def log_prob(self, features, action):
        mean, std = self(features)
        pre_tanh = self.bijector.inverse(action)
        log_prob = -0.5 * ((pre_tanh - mean) / std).square() - std.log() - 0.9189385
        return (log_prob - self.bijector.log_abs_det_jacobian(pre_tanh)).sum(-1)


def build():
    torch.manual_seed(82)
    actor = ActionDecoder().to(torch.bfloat16)
    features = torch.randn(3, 4, 12).to(torch.bfloat16)
    actions = (torch.rand(3, 4, 2) * 1.6 - 0.8).to(torch.bfloat16)
    actions[1, 2, 0] = 1.0  # the teleoperator held the stick against its stop
    return SimpleNamespace(model=actor, features=features, actions=actions, optimizer=torch.optim.SGD(actor.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    loss = -s.model.log_prob(s.features, s.actions).float().mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 100.0)
    s.optimizer.step()
    return loss

"""A flow policy (rational-quadratic spline with identity tails, as in neural spline flows) is fitted to recorded actions. One action lies
outside the tail bound. The inverse evaluates the quadratic for every action and selects the identity afterwards with where: outside the
interval the discriminant is negative, its square root is NaN, the forward drops it and the loss is fine, the backward is 0 * NaN.

Source: https://github.com/pyro-ppl/pyro/issues/3139 (negative discriminant of out-of-bound inputs), same in
https://github.com/danielward27/flowjax/issues/239 and its fix https://github.com/danielward27/flowjax/pull/240
Heals: clip the input to the interval before the spline is evaluated (or neutralise the discriminant outside). nan_to_num on the spline's
result, or a second where on it, repairs nothing: the forward was never broken.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Independent, Normal

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "sqrt_negative"),
    op=("sqrt",),
    index=(4, 1),
    masked=True,
    role=("log_probs", "hidden"),
    fix=("mask_before_op", "clamp_input", "avoid_singular_op"),
    variable=(None,),
    line=("root = (2.0 * c) / (-b - torch.sqrt(discriminant))",),
)


class RationalQuadraticTails(nn.Module):
    """Element-wise monotone spline on [-bound, bound], identity outside."""

    def __init__(self, bins=6, bound=3.0, min_size=1e-3, min_derivative=1e-3):
        super().__init__()
        self.bins, self.bound, self.min_size, self.min_derivative = bins, bound, min_size, min_derivative

    def _knots(self, unnormalized):
        sizes = self.min_size + (1 - self.min_size * self.bins) * unnormalized.softmax(-1)
        knots = F.pad(sizes.cumsum(-1), (1, 0)) * 2 * self.bound - self.bound
        return knots, knots[..., 1:] - knots[..., :-1]

    def inverse(self, inputs, params):
        w, h, d = params.split([self.bins, self.bins, self.bins - 1], dim=-1)
        inside = (inputs >= -self.bound) & (inputs <= self.bound)
        x_knots, widths = self._knots(w)
        y_knots, heights = self._knots(h)
        derivatives = F.pad(self.min_derivative + F.softplus(d), (1, 1), value=1.0)
        bin_idx = (inputs.unsqueeze(-1) >= y_knots[..., 1:-1]).sum(-1, keepdim=True)

        def pick(t):
            return t.gather(-1, bin_idx).squeeze(-1)

        x_k, y_k, width, height = pick(x_knots), pick(y_knots), pick(widths), pick(heights)
        d_k, d_k1 = pick(derivatives), pick(derivatives[..., 1:])
        delta = height / width
        curvature = d_k + d_k1 - 2 * delta
        rise = inputs - y_k
        a = rise * curvature + height * (delta - d_k)
        b = height * d_k - rise * curvature
        c = -delta * rise
        discriminant = b.pow(2) - 4 * a * c
        root = (2.0 * c) / (-b - torch.sqrt(discriminant))
        outputs = root * width + x_k
        theta = root * (1 - root)
        denominator = delta + curvature * theta
        slope = delta.pow(2) * (d_k1 * root.pow(2) + 2 * delta * theta + d_k * (1 - root).pow(2))
        logabsdet = -(torch.log(slope) - 2 * torch.log(denominator))
        return torch.where(inside, outputs, inputs), torch.where(inside, logabsdet, torch.zeros_like(logabsdet))


class FlowPolicy(nn.Module):
    def __init__(self, obs_dim=5, act_dim=3, bins=6):
        super().__init__()
        self.act_dim, self.spline = act_dim, RationalQuadraticTails(bins)
        self.net = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, act_dim * (3 * bins - 1)))

    def log_prob(self, obs, actions):
        params = self.net(obs).view(*actions.shape, -1)
        noise, logabsdet = self.spline.inverse(actions, params)
        base = Independent(Normal(torch.zeros(self.act_dim), torch.ones(self.act_dim)), 1)
        return base.log_prob(noise) + logabsdet.sum(-1)


def build():
    torch.manual_seed(3139)
    policy = FlowPolicy()
    with torch.no_grad():
        policy.net[-1].bias.view(3, -1)[:, 11] += 1.0  # the last bin is steep after some training
    obs = torch.randn(8, 5)
    actions = torch.randn(8, 3).clamp(-2.5, 2.5)
    actions[4, 1] = 5.5  # a recorded command beyond the tail bound of 3
    return SimpleNamespace(model=policy, obs=obs, actions=actions, optimizer=torch.optim.Adam(policy.parameters(), lr=3e-4))


def run(s=None):
    s = s or build()
    loss = -s.model.log_prob(s.obs, s.actions).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""pytorch #20192 - spectral normalisation of a layer whose weight is zero: eps guards the power iteration, not the division.

The last projection of the discriminator is zero-initialised. u and v stay finite (l2normalize has an eps), but sigma = u^T W v is 0 whatever
they are, so weight / sigma is 0 / 0 and every score is NaN. The answer in the issue: the behaviour follows the original chainer code.
Source: https://github.com/pytorch/pytorch/issues/20192
Heals: sigma with a floor, a non-zero initialisation. Does not: a larger eps in l2normalize.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator", "representable_eps", "fix_upstream", "validate_config", "avoid_singular_op"),
    variable=("weight_sn",),
    line=("weight_sn = self.weight / sigma",),
)


def l2normalize(v, eps=1e-12):
    return v / (v.norm() + eps)


class SNLinear(nn.Module):
    def __init__(self, in_features, out_features, n_power_iterations=1):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_uniform_(self.weight)
        self.n_power_iterations = n_power_iterations
        self.register_buffer("u", l2normalize(torch.randn(out_features)))
        self.register_buffer("v", l2normalize(torch.randn(in_features)))

    def forward(self, x):
        with torch.no_grad():
            for _ in range(self.n_power_iterations):
                self.v.copy_(l2normalize(self.weight.t() @ self.u))
                self.u.copy_(l2normalize(self.weight @ self.v))
        sigma = torch.dot(self.u.clone(), self.weight @ self.v.clone())
        weight_sn = self.weight / sigma
        return F.linear(x, weight_sn, self.bias)


class Discriminator(nn.Module):
    def __init__(self, dim=6, hidden=16):
        super().__init__()
        self.fc1 = SNLinear(dim, hidden)
        self.fc2 = SNLinear(hidden, hidden)
        self.out = SNLinear(hidden, 1)
        nn.init.zeros_(self.out.weight)  # the critic starts with an even score

    def forward(self, x):
        h = F.leaky_relu(self.fc1(x), 0.1)
        h = F.leaky_relu(self.fc2(h), 0.1)
        return self.out(h).squeeze(-1)


def build():
    torch.manual_seed(4)
    discriminator = Discriminator()
    real = torch.randn(8, 6) + 1.0
    fake = torch.randn(8, 6)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.0, 0.9))
    return SimpleNamespace(model=discriminator, real=real, fake=fake, optimizer=optimizer)


def run(s=None):
    s = s or build()
    loss = F.relu(1.0 - s.model(s.real)).mean() + F.relu(1.0 + s.model(s.fake)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

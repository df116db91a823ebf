"""SAC actor with a tanh-squashed Gaussian: the log determinant is written with softplus, actions sit at the very edge of their range."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY = "tanh returns exactly 1.0 for some actions and 1 - tanh^2 would be 0, the softplus form does not care"


def build():
    torch.manual_seed(321)
    actor = nn.Linear(5, 4)
    critic = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1)).requires_grad_(False)
    with torch.no_grad():
        actor.bias[1] = 25.0
    log_alpha = torch.zeros((), requires_grad=True)
    opts = (torch.optim.Adam(actor.parameters(), lr=1e-3), torch.optim.Adam([log_alpha], lr=1e-3))
    return SimpleNamespace(actor=actor, critic=critic, log_alpha=log_alpha, opts=opts, obs=torch.randn(6, 5))


def run(s=None):
    s = s or build()
    gen = torch.Generator().manual_seed(2)
    for _ in range(3):
        mean, log_std = s.actor(s.obs).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        noise = torch.randn(mean.shape, generator=gen)
        u = mean + log_std.exp() * noise
        logp = (-0.5 * noise.pow(2) - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        logp = logp - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)
        q = s.critic(torch.cat([s.obs, torch.tanh(u)], -1)).squeeze(-1)
        loss = (s.log_alpha.exp().detach() * logp - q).mean()
        alpha_loss = -(s.log_alpha * (logp.detach() - 2.0)).mean()
        for opt in s.opts:
            opt.zero_grad()
        loss.backward()
        alpha_loss.backward()
        for opt in s.opts:
            opt.step()
    return loss

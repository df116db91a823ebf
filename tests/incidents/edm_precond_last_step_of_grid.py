"""EDM preconditioning: the noise embedding takes log(sigma) / 4, and a sample is drawn at the sigma = 0 that closes the sampling grid.

Fine-tuning on the Karras grid of the sampler draws a step index up to and including the appended zero. c_skip, c_out and c_in are fine at 0,
c_noise is log(0) = -inf and the cosine of it is NaN. Drawing one step less or clamping sigma at sigma_min heals it; giving that sample
a loss weight of zero does not (0 * NaN), nor does gradient clipping.

Source: https://github.com/NVlabs/edm/blob/main/training/networks.py (EDMPrecond), generate.py (t_steps with the zero appended)
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2, 0),
    masked=None,
    role=("hidden",),
    fix=("clamp_input", "fix_upstream", "drop_invalid_sample"),
    variable=(None, "c_noise"),
    line=("c_noise = sigma.log() / 4",),
)


def karras_steps(num_steps, sigma_min=0.002, sigma_max=80.0, rho=7):
    ramp = torch.arange(num_steps) / (num_steps - 1)
    t_steps = (sigma_max ** (1 / rho) + ramp * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
    return torch.cat([t_steps, torch.zeros(1)])  # t_N = 0


class PositionalEmbedding(nn.Module):
    def __init__(self, num_channels, max_positions=10000):
        super().__init__()
        self.num_channels = num_channels
        self.max_positions = max_positions

    def forward(self, x):
        freqs = torch.arange(self.num_channels // 2) / (self.num_channels // 2)
        freqs = (1 / self.max_positions) ** freqs
        x = x.outer(freqs)
        return torch.cat([x.cos(), x.sin()], dim=1)


class Net(nn.Module):
    def __init__(self, dim=10, width=24):
        super().__init__()
        self.map_noise = PositionalEmbedding(width)
        self.map_layer = nn.Linear(width, width)
        self.enc = nn.Linear(dim, width)
        self.dec = nn.Linear(width, dim)

    def forward(self, x, noise_labels):
        emb = F.silu(self.map_layer(self.map_noise(noise_labels)))
        return self.dec(F.silu(self.enc(x) + emb))


class EDMPrecond(nn.Module):
    def __init__(self, sigma_data=0.5):
        super().__init__()
        self.sigma_data = sigma_data
        self.model = Net()

    def forward(self, x, sigma):
        sigma = sigma.reshape(-1, 1)
        c_skip = self.sigma_data**2 / (sigma**2 + self.sigma_data**2)
        c_out = sigma * self.sigma_data / (sigma**2 + self.sigma_data**2).sqrt()
        c_in = 1 / (self.sigma_data**2 + sigma**2).sqrt()
        c_noise = sigma.log() / 4
        F_x = self.model(c_in * x, c_noise.flatten())
        return c_skip * x + c_out * F_x


def build():
    torch.manual_seed(22)
    model = EDMPrecond()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    t_steps = karras_steps(18)
    step = torch.tensor([4, 11, 18, 0, 9, 15])  # randint(0, len(t_steps))
    return SimpleNamespace(model=model, optimizer=optimizer, images=0.5 * torch.randn(6, 10), sigma=t_steps[step], noise=torch.randn(6, 10))


def run(s=None):
    s = s or build()
    noised = s.images + s.sigma[:, None] * s.noise
    denoised = s.model(noised, s.sigma)
    loss = (denoised - s.images).square().mean()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

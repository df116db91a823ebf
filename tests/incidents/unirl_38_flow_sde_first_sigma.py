"""Flow-GRPO turns the ODE into an SDE with std sqrt(sigma / (1 - sigma)); the first timestep has sigma = 1 and the division gives inf.
https://github.com/Tencent-Hunyuan/UniRL/pull/38

The sampler replaces sigma_0 by the next one, the loss recomputes the std by itself and does not.
Heals: the same replacement (or a clamped denominator) in the loss. Does not: nan_to_num on the log-prob, the gradient stays NaN.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(2, 0),
    masked=None,
    role=("hidden", "log_probs"),
    fix=("clamp_denominator", "clamp_input", "validate_config", "drop_invalid_sample"),
    variable=(None,),
    line=("std_dev_t = torch.sqrt(sigma / (1 - sigma)) * noise_level",),
)


class VelocityNet(nn.Module):
    def __init__(self, dim=6, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, width), nn.SiLU(), nn.Linear(width, dim))

    def forward(self, latents, sigma):
        return self.net(torch.cat([latents, sigma], dim=-1))


def sde_mean(latents, velocity, sigma, dt, std):
    drift = std**2 / (2 * sigma)
    return latents * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt


@torch.no_grad()
def sample(model, sigmas, noise_level, batch_size, dim):
    latents = torch.randn(batch_size, dim)
    path, log_probs = [latents], []
    for i in range(len(sigmas) - 1):
        sigma = sigmas[i].expand(batch_size, 1)
        dt = sigmas[i + 1] - sigmas[i]
        capped = torch.where(sigma == 1, sigmas[1], sigma)
        std = torch.sqrt(sigma / (1 - capped)) * noise_level
        mean = sde_mean(latents, model(latents, sigma), sigma, dt, std)
        scale = std * torch.sqrt(-dt)
        latents = mean + scale * torch.randn(batch_size, dim)
        log_probs.append(gaussian_log_prob(latents, mean, scale))
        path.append(latents)
    return torch.stack(path, 1), torch.stack(log_probs, 1)


def gaussian_log_prob(x, mean, scale):
    return (-((x - mean) ** 2) / (2 * scale**2) - torch.log(scale) - 0.5 * math.log(2 * math.pi)).mean(-1)


def step_log_prob(model, sigmas, latents, next_latents, steps, noise_level):
    sigma = sigmas[steps].unsqueeze(-1)
    dt = sigmas[steps + 1].unsqueeze(-1) - sigma
    std_dev_t = torch.sqrt(sigma / (1 - sigma)) * noise_level
    mean = sde_mean(latents, model(latents, sigma), sigma, dt, std_dev_t)
    return gaussian_log_prob(next_latents, mean, std_dev_t * torch.sqrt(-dt))


def build():
    torch.manual_seed(38)
    model = VelocityNet()
    sigmas = torch.tensor([1.0, 0.8, 0.55, 0.25, 0.05])
    latents, log_probs = sample(model, sigmas, 0.7, 4, 6)
    rewards = torch.tensor([0.31, 0.72, 0.55, 0.12])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    order = torch.tensor([[2, 0, 1, 3], [1, 3, 0, 2], [0, 2, 3, 1], [3, 1, 2, 0]])
    batch = dict(latents=latents, log_probs=log_probs, advantages=advantages, order=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, sigmas=sigmas, noise_level=0.7, clip_range=1e-3)


def run(s=None):
    s = s or build()
    b, rows, total = s.batch, torch.arange(4), 0.0
    s.optimizer.zero_grad()
    for j in range(4):
        steps = b["order"][:, j]
        log_prob = step_log_prob(s.model, s.sigmas, b["latents"][rows, steps], b["latents"][rows, steps + 1], steps, s.noise_level)
        ratio = torch.exp(log_prob - b["log_probs"][rows, steps])
        unclipped = -b["advantages"] * ratio
        clipped = -b["advantages"] * ratio.clamp(1 - s.clip_range, 1 + s.clip_range)
        loss = torch.maximum(unclipped, clipped).mean() / 4
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return total

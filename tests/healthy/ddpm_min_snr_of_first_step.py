"""Diffusion with min-SNR weights: with 10 000 steps and no offset the first alpha-bar is 1 in fp32, and its SNR is 1 / 0 = inf. Healthy.

The weight of predicting x0 is the SNR clamped at gamma = 5; inf becomes 5, which is also the right weight of an almost clean image. The table is a
buffer without gradient, clamped where it is read. The coefficients that use 1 - alpha-bar otherwise are roots of 0 without gradient: the noise at the first step is 0.
Source: https://github.com/lucidrains/denoising-diffusion-pytorch (GaussianDiffusion: snr, maybe_clipped_snr.clamp_(max=min_snr_gamma), objective pred_x0).
Heals: nothing to heal. Does not: -
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


def cosine_beta_schedule(timesteps, s=0.0):
    t = torch.linspace(0, timesteps, timesteps + 1, dtype=torch.float64) / timesteps
    alphas_cumprod = torch.cos((t + s) / (1 + s) * math.pi * 0.5) ** 2
    alphas_cumprod = alphas_cumprod / alphas_cumprod[0]
    betas = 1 - (alphas_cumprod[1:] / alphas_cumprod[:-1])
    return torch.clip(betas, 0, 0.999)


class GaussianDiffusion(nn.Module):
    def __init__(self, dim=6, timesteps=10_000, min_snr_gamma=5.0):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(dim + 1, 24), nn.SiLU(), nn.Linear(24, dim))
        self.timesteps = timesteps
        alphas_cumprod = torch.cumprod(1.0 - cosine_beta_schedule(timesteps), dim=0).to(torch.float32)
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        self.register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))
        snr = alphas_cumprod / (1 - alphas_cumprod)
        self.register_buffer("snr", snr)
        self.min_snr_gamma = min_snr_gamma

    def forward(self, x_start, t):
        noise = torch.randn_like(x_start)
        x = self.sqrt_alphas_cumprod[t, None] * x_start + self.sqrt_one_minus_alphas_cumprod[t, None] * noise
        pred = self.model(torch.cat([x, t[:, None] / self.timesteps], dim=1))
        loss = F.mse_loss(pred, x_start, reduction="none").mean(dim=1)
        maybe_clipped_snr = self.snr[t].clone()
        maybe_clipped_snr.clamp_(max=self.min_snr_gamma)
        return (loss * maybe_clipped_snr).mean()  # objective: x0


def build():
    torch.manual_seed(30)
    diffusion = GaussianDiffusion()
    batch = dict(x=torch.randn(5, 6), t=torch.tensor([0, 1, 400, 5000, 9999]))
    return SimpleNamespace(model=diffusion, optimizer=torch.optim.Adam(diffusion.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(3):
        loss = s.model(s.batch["x"], s.batch["t"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())

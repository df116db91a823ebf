"""TRL's DDPO step with eta above 1: 1 - alpha_prev - sigma^2 is negative and its root is NaN.

DDPO asks the DDIM sampler for a Gaussian step and uses its log-probability.  With eta = 1.2 ("more exploration") the variance at the noisy end
of the schedule is larger than 1 - alpha_prev, so the direction towards x_t has an imaginary length: (negative) ** 0.5 is NaN, and so are
the step's mean, its log-probability and the PPO loss.  The cleaner timesteps of the same batch are fine.

Source: `scheduler_step` of https://github.com/huggingface/trl/blob/v0.11.4/trl/models/modeling_sd_base.py (formulas 12 and 16 of DDIM);
planted: eta = 1.2.
Heals: eta at most 1, or clamp the radicand at 0.  Tempting and no help: clipping the ratio or the advantages, fp32, clipping gradients.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("pow",),
    index=(0, 0, 0, 0),
    masked=None,
    role=("hidden", "log_probs"),
    fix=("clamp_input", "validate_config"),
    variable=("direction_scale",),
    line=("direction_scale = (1 - alpha_prod_t_prev - std_dev_t**2) ** 0.5",),
)


class Scheduler:
    def __init__(self, num_train_timesteps=1000, num_inference_steps=5):
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, num_train_timesteps) ** 2
        self.alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.stride = num_train_timesteps // num_inference_steps
        self.timesteps = torch.arange(num_inference_steps - 1, -1, -1) * self.stride + 1

    def gather(self, timestep):
        return self.alphas_cumprod[timestep.clamp(min=0)].view(-1, 1, 1, 1)


def scheduler_step(scheduler, model_output, timestep, sample, eta, prev_sample):
    alpha_prod_t = scheduler.gather(timestep)
    alpha_prod_t_prev = scheduler.gather(timestep - scheduler.stride)
    beta_prod_t = 1 - alpha_prod_t

    pred_original_sample = (sample - beta_prod_t**0.5 * model_output) / alpha_prod_t**0.5

    variance = (1 - alpha_prod_t_prev) / beta_prod_t * (1 - alpha_prod_t / alpha_prod_t_prev)
    std_dev_t = eta * variance**0.5
    direction_scale = (1 - alpha_prod_t_prev - std_dev_t**2) ** 0.5
    prev_sample_mean = alpha_prod_t_prev**0.5 * pred_original_sample + direction_scale * model_output

    log_prob = -((prev_sample - prev_sample_mean) ** 2) / (2 * std_dev_t**2) - std_dev_t.log() - 0.5 * math.log(2 * math.pi)
    return log_prob.mean(dim=(1, 2, 3))


class Unet(nn.Module):
    def __init__(self, channels=4, hidden=16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, hidden), nn.SiLU())
        self.conv_in = nn.Conv2d(channels, hidden, 3, padding=1)
        self.conv_out = nn.Conv2d(hidden, channels, 3, padding=1)

    def forward(self, sample, timestep):
        emb = self.time(timestep.float().view(-1, 1) / 1000)[:, :, None, None]
        return self.conv_out(torch.nn.functional.silu(self.conv_in(sample) + emb))


def build():
    torch.manual_seed(12)
    unet = Unet()
    scheduler = Scheduler()
    timesteps = scheduler.timesteps[:4]  # 801, 601, 401, 201
    latents = torch.randn(4, 4, 6, 6)
    next_latents = latents * 0.9 + 0.3 * torch.randn(4, 4, 6, 6)
    old_log_probs = torch.full((4,), -1.0)
    advantages = torch.tensor([1.0, -0.5, 0.7, -1.2])
    optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-4)
    return SimpleNamespace(
        model=unet,
        optimizer=optimizer,
        scheduler=scheduler,
        timesteps=timesteps,
        latents=latents,
        next_latents=next_latents,
        old_log_probs=old_log_probs,
        advantages=advantages,
        eta=1.2,
    )


def run(s=None):
    s = s or build()
    noise_pred = s.model(s.latents, s.timesteps)
    log_prob = scheduler_step(s.scheduler, noise_pred, s.timesteps, s.latents, s.eta, s.next_latents)
    ratio = torch.exp((log_prob - s.old_log_probs).clamp(-5, 5))
    unclipped = -s.advantages * ratio
    clipped = -s.advantages * ratio.clamp(1 - 1e-1, 1 + 1e-1)
    loss = torch.max(unclipped, clipped).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    run()

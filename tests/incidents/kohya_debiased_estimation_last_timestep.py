"""kohya sd-scripts, apply_debiased_estimation with betas of zero terminal SNR - 1 / sqrt(0) at the last timestep.

Debiased estimation weighs the loss of each sample by 1 / sqrt(SNR). The SNR is capped from above because it may be inf at t = 0; with rescaled betas it is zero at t = T - 1
and a sample drawn there has the weight inf. (Source: kohya-ss/sd-scripts, library/custom_train_functions.py, apply_debiased_estimation and prepare_scheduler_for_custom_training,
in the form without v_prediction.) Heals: snr_t.clamp(min=1e-3) before the root; 1 / (snr_t + 1) (the project's later form for v-prediction; changes all weights);
drawing the timesteps below T - 1; refusing the two options together.
Does not: an eps of 1e-10 (finite, but a loss of 3e9), a cap of 1000 from above, clipping the gradient norm, a huber loss.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div", "reciprocal", "rdiv", "rtruediv", "truediv"),
    index=(2,),
    masked=None,
    role=("is_weight", "loss"),
    fix=(
        "clamp_denominator",
        "clamp_input",
        "validate_config",
        "drop_invalid_sample",
        "fix_upstream",
        "where_on_detached",
        "avoid_singular_op",
    ),
    variable=("weight",),
    line=("weight = 1 / torch.sqrt(snr_t)",),
)


class DDPMScheduler:
    def __init__(self, num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012):
        self.betas = torch.linspace(beta_start**0.5, beta_end**0.5, num_train_timesteps) ** 2
        self.alphas_cumprod = torch.cumprod(1.0 - self.betas, dim=0)

    def add_noise(self, original_samples, noise, timesteps):
        acp = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        return acp.sqrt() * original_samples + (1 - acp).sqrt() * noise

    def get_velocity(self, sample, noise, timesteps):
        acp = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        return acp.sqrt() * noise - (1 - acp).sqrt() * sample


def fix_noise_scheduler_betas_for_zero_terminal_snr(noise_scheduler):
    alphas_bar_sqrt = noise_scheduler.alphas_cumprod.sqrt()
    alphas_bar_sqrt_0 = alphas_bar_sqrt[0].clone()
    alphas_bar_sqrt_T = alphas_bar_sqrt[-1].clone()
    alphas_bar_sqrt -= alphas_bar_sqrt_T
    alphas_bar_sqrt *= alphas_bar_sqrt_0 / (alphas_bar_sqrt_0 - alphas_bar_sqrt_T)
    noise_scheduler.alphas_cumprod = alphas_bar_sqrt**2


def prepare_scheduler_for_custom_training(noise_scheduler):
    alphas_cumprod = noise_scheduler.alphas_cumprod
    alpha = torch.sqrt(alphas_cumprod)
    sigma = torch.sqrt(1.0 - alphas_cumprod)
    noise_scheduler.all_snr = (alpha / sigma) ** 2


def apply_debiased_estimation(loss, timesteps, noise_scheduler):
    snr_t = torch.stack([noise_scheduler.all_snr[t] for t in timesteps])
    snr_t = torch.minimum(snr_t, torch.ones_like(snr_t) * 1000)
    weight = 1 / torch.sqrt(snr_t)
    loss = weight * loss
    return loss


class TinyUnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Conv2d(4, 8, 3, padding=1)
        self.time = nn.Linear(1, 8)
        self.out = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x, t):
        return self.out(F.silu(self.inp(x) + self.time(t[:, None] / 1000.0)[:, :, None, None]))


def build():
    torch.manual_seed(9)
    noise_scheduler = DDPMScheduler()
    fix_noise_scheduler_betas_for_zero_terminal_snr(noise_scheduler)
    prepare_scheduler_for_custom_training(noise_scheduler)
    unet = TinyUnet()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    latents, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    return SimpleNamespace(
        model=unet,
        optimizer=optimizer,
        noise_scheduler=noise_scheduler,
        latents=latents,
        noise=noise,
        timesteps=torch.tensor([17, 640, 999, 301]),
    )


def run(s=None):
    s = s or build()
    noisy_latents = s.noise_scheduler.add_noise(s.latents, s.noise, s.timesteps)
    noise_pred = s.model(noisy_latents, s.timesteps)
    target = s.noise_scheduler.get_velocity(s.latents, s.noise, s.timesteps)
    loss = F.mse_loss(noise_pred.float(), target.float(), reduction="none")
    loss = loss.mean([1, 2, 3])
    loss = apply_debiased_estimation(loss, s.timesteps, s.noise_scheduler)
    loss = loss.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

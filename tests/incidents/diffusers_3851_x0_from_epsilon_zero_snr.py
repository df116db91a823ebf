"""diffusers #3851 - rescale_betas_zero_snr together with epsilon prediction: the predicted x0 divides by sqrt(alpha_bar_T) = 0.

The betas are rescaled to zero terminal SNR, so alphas_cumprod[-1] is exactly 0. The sample that drew the last timestep gets
(x_t - sigma * eps) / 0 = inf, its x0 loss is inf and the denoiser's gradients are not finite.
Source: https://github.com/huggingface/diffusers/issues/3851
Heals: v-prediction, a floor on alphas_cumprod (diffusers uses 2**-24), no last timestep. Does not: clip_sample (clamp of the inf): its
gradient is 0 / 0.
"""

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
    role=("hidden",),
    fix=(
        "validate_config",
        "clamp_denominator",
        "avoid_singular_op",
        "drop_invalid_sample",
        "clamp_input",
        "representable_eps",
        "mask_before_op",
        "fix_upstream",
    ),
    variable=("pred_original_sample",),
    line=("pred_original_sample = (sample - beta_prod_t**0.5 * model_output) / alpha_prod_t**0.5",),
)


def rescale_zero_terminal_snr(betas):
    alphas_bar_sqrt = (1.0 - betas).cumprod(0).sqrt()
    first = alphas_bar_sqrt[0].clone()
    last = alphas_bar_sqrt[-1].clone()
    alphas_bar_sqrt = (alphas_bar_sqrt - last) * first / (first - last)
    alphas_bar = alphas_bar_sqrt**2
    alphas = torch.cat([alphas_bar[0:1], alphas_bar[1:] / alphas_bar[:-1]])
    return 1.0 - alphas


class DDIMScheduler:
    def __init__(self, num_train_timesteps=100, beta_start=0.00085, beta_end=0.12, rescale_betas_zero_snr=False):
        betas = torch.linspace(beta_start**0.5, beta_end**0.5, num_train_timesteps) ** 2
        if rescale_betas_zero_snr:
            betas = rescale_zero_terminal_snr(betas)
        self.alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.num_train_timesteps = num_train_timesteps

    def add_noise(self, original, noise, timesteps):
        a = self.alphas_cumprod[timesteps].view(-1, 1)
        return a**0.5 * original + (1 - a) ** 0.5 * noise

    def predict_original(self, model_output, timesteps, sample):
        alpha_prod_t = self.alphas_cumprod[timesteps].view(-1, 1)
        beta_prod_t = 1 - alpha_prod_t
        pred_original_sample = (sample - beta_prod_t**0.5 * model_output) / alpha_prod_t**0.5
        return pred_original_sample


class Denoiser(nn.Module):
    def __init__(self, dim=8, hidden=32, steps=100):
        super().__init__()
        self.time = nn.Embedding(steps, hidden)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, t):
        return self.fc2(torch.nn.functional.silu(self.fc1(x) + self.time(t)))


def build():
    torch.manual_seed(6)
    model = Denoiser()
    scheduler = DDIMScheduler(rescale_betas_zero_snr=True)
    latents = torch.randn(4, 8)
    noise = torch.randn(4, 8)
    timesteps = torch.tensor([12, 57, 99, 80])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, scheduler=scheduler, latents=latents, noise=noise, timesteps=timesteps, optimizer=optimizer)


def run(s=None):
    s = s or build()
    noisy = s.scheduler.add_noise(s.latents, s.noise, s.timesteps)
    noise_pred = s.model(noisy, s.timesteps)
    pred_x0 = s.scheduler.predict_original(noise_pred, s.timesteps, noisy)
    loss = torch.nn.functional.smooth_l1_loss(pred_x0, s.latents)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

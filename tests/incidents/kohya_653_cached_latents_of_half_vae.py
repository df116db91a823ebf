"""kohya sd-scripts #653 - latents were cached with the SDXL autoencoder in fp16, one picture's latents are NaN.

The latents of the data set are computed once and kept; the trainer only ever sees the cache. For one bright picture the half-precision encoder
overflowed, so its whole latent is NaN. It is an ordinary sample of the batch: the noised latent, the prediction, the weighted loss and every
gradient of the adapter become NaN.

Source: https://github.com/kohya-ss/sd-scripts/issues/653 (also #725, bmaltais/kohya_ss #1908: "NaN found in latents, replacing with zeros").

Heals: leave the sample out (index it away), refuse the cache file, or encode again with `--no_half_vae`. Does not heal: a loss weight of 0 for
the sample (0 * NaN), `nan_to_num` on the per-sample loss (the gradient is NaN still), gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("input",),
    index=(2, 0, 0, 0),
    masked=False,
    role=("hidden", "input", "latents"),
    fix=("drop_invalid_sample", "reject_input", "fix_upstream"),
    variable=("latents",),
    line=('latents = batch["latents"] * VAE_SCALE',),
)

VAE_SCALE = 0.13025


class LoRAConv(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Conv2d(base.in_channels, rank, 3, padding=1, bias=False)
        self.up = nn.Conv2d(rank, base.out_channels, 1, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class TinyUNet(nn.Module):
    def __init__(self, channels=4, width=8):
        super().__init__()
        self.conv_in = LoRAConv(nn.Conv2d(channels, width, 3, padding=1))
        self.time = nn.Linear(1, width).requires_grad_(False)
        self.norm = nn.GroupNorm(2, width).requires_grad_(False)
        self.conv_out = LoRAConv(nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x, timesteps):
        t = self.time(timesteps[:, None].float() / 1000.0)
        h = F.silu(self.norm(self.conv_in(x) + t[:, :, None, None]))
        return self.conv_out(h)


def build():
    torch.manual_seed(2104)
    model = TinyUNet()
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    batch = {"latents": torch.randn(4, 4, 6, 6) * 5.0, "loss_weights": torch.tensor([1.0, 1.0, 0.75, 1.0])}
    batch["latents"][2] = float("nan")  # what the npz file holds
    return SimpleNamespace(
        model=model,
        batch=batch,
        alphas_cumprod=(1 - betas).cumprod(0),
        generator=torch.Generator().manual_seed(7),
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4),
    )


def run(s=None):
    s = s or build()
    batch = s.batch
    s.optimizer.zero_grad(set_to_none=True)
    latents = batch["latents"] * VAE_SCALE
    noise = torch.randn(latents.shape, generator=s.generator)
    timesteps = torch.randint(0, 1000, (latents.shape[0],), generator=s.generator)
    a = s.alphas_cumprod[timesteps][:, None, None, None]
    noisy = a.sqrt() * latents + (1 - a).sqrt() * noise
    noise_pred = s.model(noisy, timesteps)
    loss = F.mse_loss(noise_pred, noise, reduction="none").mean(dim=(1, 2, 3))
    loss = (loss * batch["loss_weights"]).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in s.model.parameters() if p.requires_grad], 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""diffusers SDXL refiner training - the loss is NaN for batches that hold an image without an aesthetic score.

The metadata table was written by pandas; a missing score is read back as NaN and joins the sizes and crop offsets in the micro conditioning. Its
sinusoidal embedding is NaN, and with it the prediction of that image and the mean loss.
Source: https://github.com/huggingface/diffusers/blob/main/examples/text_to_image/train_text_to_image_sdxl.py (compute_time_ids, with the score of
the refiner's requires_aesthetics_score)
Heals: leaving the image out of the batch, a check in the dataset, filling the score there. Does not: taking that image's loss out with where (its
gradient is 0 * NaN), clipping gradients.
"""

import json
import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any", "input", "tensor"),
    index=(1, 4),
    masked=None,
    role=("hidden",),
    fix=("drop_invalid_sample", "reject_input", "fix_upstream", "clamp_input", "mask_before_op"),
    variable=("add_time_ids", "time_ids", "aesthetic_score", "records", "s.records"),
    line=(
        "add_time_ids = torch.tensor([compute_time_ids(r) for r in s.records])",
        "time_embeds = get_timestep_embedding(time_ids.flatten(), self.add_dim).reshape(len(sample), -1)",
        "model_pred = s.model(noisy_latents, s.timesteps, add_time_ids)",
        "args = timesteps.float()[:, None] * freqs[None]",
        'return [*record["original_size"], *record["crop_top_left"], record["aesthetic_score"]]',
    ),
)

METADATA = """
{"file_name": "00017.jpg", "original_size": [1024, 768], "crop_top_left": [0, 128], "aesthetic_score": 6.1}
{"file_name": "00018.jpg", "original_size": [512, 512], "crop_top_left": [0, 0], "aesthetic_score": NaN}
{"file_name": "00019.jpg", "original_size": [900, 1600], "crop_top_left": [350, 0], "aesthetic_score": 4.8}
{"file_name": "00020.jpg", "original_size": [1024, 1024], "crop_top_left": [0, 0], "aesthetic_score": 5.5}
"""


def compute_time_ids(record):
    return [*record["original_size"], *record["crop_top_left"], record["aesthetic_score"]]


def get_timestep_embedding(timesteps, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    args = timesteps.float()[:, None] * freqs[None]
    return torch.cat([args.cos(), args.sin()], dim=-1)


class UNet(nn.Module):
    def __init__(self, channels=4, width=16, addition_time_embed_dim=8):
        super().__init__()
        self.add_dim = addition_time_embed_dim
        self.time_embedding = nn.Linear(width, width)
        self.add_embedding = nn.Linear(5 * addition_time_embed_dim, width)
        self.conv_in = nn.Conv2d(channels, width, 3, padding=1)
        self.conv_out = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, sample, timesteps, time_ids):
        emb = self.time_embedding(get_timestep_embedding(timesteps, self.time_embedding.in_features))
        time_embeds = get_timestep_embedding(time_ids.flatten(), self.add_dim).reshape(len(sample), -1)
        emb = F.silu(emb + self.add_embedding(time_embeds))
        return self.conv_out(F.silu(self.conv_in(sample) + emb[:, :, None, None]))


def build():
    torch.manual_seed(187)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    records = [json.loads(line) for line in METADATA.strip().splitlines()]
    latents = torch.randn(4, 4, 8, 8)
    noise = torch.randn(4, 4, 8, 8)
    timesteps = torch.tensor([17, 403, 120, 88])
    alphas_cumprod = torch.cumprod(1 - torch.linspace(0.00085, 0.012, 1000), dim=0)
    return SimpleNamespace(
        model=model, optimizer=optimizer, records=records, latents=latents, noise=noise, timesteps=timesteps, alphas_cumprod=alphas_cumprod
    )


def run(s=None):
    s = s or build()
    add_time_ids = torch.tensor([compute_time_ids(r) for r in s.records])
    alpha = s.alphas_cumprod[s.timesteps].view(-1, 1, 1, 1)
    noisy_latents = alpha.sqrt() * s.latents + (1 - alpha).sqrt() * s.noise
    model_pred = s.model(noisy_latents, s.timesteps, add_time_ids)
    loss = F.mse_loss(model_pred, s.noise)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

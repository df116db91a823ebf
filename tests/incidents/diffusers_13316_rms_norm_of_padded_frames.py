"""Diffusers, WanRMS_norm in half over padded latent frames - finetuning a video decoder on clips of different length.

The norm of the Wan/Qwen autoencoders is F.normalize(x, dim=1) * scale * gamma. Its eps of 1e-12 rounds to 0 in half, so a pixel whose channels are all zero is 0/0. Clips are padded with frames
of zero latents, which the loss leaves out by a product with the frame mask. Source: https://github.com/huggingface/diffusers/pull/13316, autoencoder_kl_wan.py (WanRMS_norm).
Heals: normalise in float32, an eps that half can hold, fill the padded frames before the norm, keep only the real frames by index.
Does not: masked selection with torch.where of the loss alone (0 * NaN in backward), the mask as a product, nan_to_num of the output (the gradient of gamma stays NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero", "nan_times_zero_mask"),
    op=("normalize", "div"),
    index=(1, 0, 2, 0, 0),
    masked=True,
    role=("hidden",),
    fix=(
        "upcast_fp32",
        "representable_eps",
        "clamp_denominator",
        "mask_before_op",
        "where_on_detached",
        "stable_function",
        "drop_invalid_sample",
    ),
    variable=(None,),
    line=("return F.normalize(x, dim=1) * self.scale * self.gamma.to(x.dtype)",),
)


class WanRMS_norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim, 1, 1, 1))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.scale * self.gamma.to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, z_dim=4, dim=6):
        super().__init__()
        self.conv_in = nn.Linear(z_dim, dim, bias=False)
        self.norm_out = WanRMS_norm(dim)
        self.conv_out = nn.Linear(dim, 3)

    def forward(self, z):
        x = torch.einsum("bcthw,dc->bdthw", z, self.conv_in.weight.to(z.dtype))
        x = F.silu(self.norm_out(x))
        x = torch.einsum("bcthw,dc->bdthw", x, self.conv_out.weight.to(z.dtype))
        return x + self.conv_out.bias.to(z.dtype).view(1, -1, 1, 1, 1)


def build():
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    latents = torch.randn(2, 4, 4, 3, 3).half()
    video = torch.rand(2, 3, 4, 3, 3)
    frame_mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    latents[1, :, 2:] = 0
    video[1, :, 2:] = 0
    return SimpleNamespace(model=model, optimizer=optimizer, latents=latents, video=video, frame_mask=frame_mask)


def run(s=None):
    s = s or build()
    for _ in range(2):
        pred = s.model(s.latents).float()
        error = (pred - s.video).pow(2).mean(dim=(1, 3, 4))
        loss = (error * s.frame_mask).sum() / s.frame_mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

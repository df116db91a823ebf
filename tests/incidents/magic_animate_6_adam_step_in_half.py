"""magic_animate_unofficial, AdamW on a model kept in float16 - the first step is a division by 0.

The motion module is trained in plain half with eps=1e-8. The second moment of a small gradient rounds to 0 in half and so does eps: exp_avg / denom is inf or NaN in
optimizer.step(); loss and gradients are finite. Source: https://github.com/jinxixiang/magic_animate_unofficial/issues/6 ("FP16 causes NAN after optimizer.step", increase adam_epsilon).
Heals: eps=1e-4; float32 parameters with autocast (or a float32 master copy). Does not: clip_grad_norm_ (the gradients are small); a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_denominator"),
    op=("addcdiv", "addcdiv_", "div", "step"),
    index=(4, 7),
    masked=None,
    role=("optimizer", "weights"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator", "validate_config"),
    variable=("motion_module.proj_in.weight", None),
    line=("optimizer.step()",),
)


class TemporalMotionModule(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.proj_in = nn.Linear(channels, channels)
        self.norm = nn.LayerNorm(channels)
        self.proj_out = nn.Linear(channels, channels)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = F.gelu(self.proj_in(hidden_states))
        hidden_states = self.norm(hidden_states)
        return self.proj_out(hidden_states) + residual


class UNet(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.motion_module = TemporalMotionModule(channels)
        self.conv_out = nn.Linear(channels, 4)

    def forward(self, latents):
        return self.conv_out(self.motion_module(latents))


def build():
    torch.manual_seed(0)
    unet = UNet().to(dtype=torch.float16)
    trainable = list(unet.motion_module.parameters())
    unet.conv_out.requires_grad_(False)
    optimizer = torch.optim.AdamW(trainable, lr=1e-5, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    latents = torch.randn(2, 16, 8).half()
    noise = torch.randn(2, 16, 4).half()
    return SimpleNamespace(model=unet, optimizer=optimizer, latents=latents, noise=noise)


def run(s=None):
    s = s or build()
    unet, optimizer = s.model, s.optimizer
    for _ in range(2):
        model_pred = unet(s.latents)
        loss = F.mse_loss(model_pred.float(), s.noise.float(), reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.motion_module.parameters(), 1.0)
        optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

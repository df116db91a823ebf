"""diffusers SD3 training, weighting_scheme = sigma_sqrt - the loss is inf whenever a sample draws a small sigma under fp16 mixed precision.

The sigmas are taken in the dtype of the latents. sigma ** -2 passes 65504 for every sigma below 0.0039 and is inf in half; the .float() of the same
line comes one operation too late.
Source: https://github.com/huggingface/diffusers/blob/main/src/diffusers/training_utils.py (compute_loss_weighting_for_sd3)
Heals: casting the sigmas before the power, or a floor of 0.004 under them. Does not: the .float() that is there, clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("pow",),
    index=(1, 0, 0, 0),
    masked=None,
    role=("is_weight", "loss", "hidden"),
    fix=("upcast_fp32", "clamp_input", "clamp_denominator", "fix_upstream"),
    variable=(None, "weighting"),
    line=("weighting = (sigmas**-2.0).float()",),
)


class Transformer(nn.Module):
    def __init__(self, channels=4, width=16):
        super().__init__()
        self.patch = nn.Conv2d(channels, width, 2, stride=2)
        self.time = nn.Linear(1, width)
        self.mix = nn.Sequential(nn.GroupNorm(4, width), nn.Conv2d(width, width, 1), nn.SiLU())
        self.unpatch = nn.ConvTranspose2d(width, channels, 2, stride=2)

    def forward(self, hidden_states, timestep):
        h = self.patch(hidden_states) + self.time(timestep[:, None] / 1000)[:, :, None, None]
        return self.unpatch(h + self.mix(h))


def get_sigmas(scheduler, timesteps, n_dim, dtype):
    sigmas = scheduler.sigmas.to(dtype)
    step_indices = [(scheduler.timesteps == t).nonzero().item() for t in timesteps]
    sigma = sigmas[step_indices].flatten()
    while sigma.dim() < n_dim:
        sigma = sigma.unsqueeze(-1)
    return sigma


def compute_loss_weighting_for_sd3(weighting_scheme, sigmas):
    if weighting_scheme == "sigma_sqrt":
        weighting = (sigmas**-2.0).float()
    elif weighting_scheme == "cosmap":
        weighting = 2 / (torch.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    else:
        weighting = torch.ones_like(sigmas)
    return weighting


def build():
    torch.manual_seed(8528)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    timesteps = torch.linspace(1000, 1, 1000)
    scheduler = SimpleNamespace(timesteps=timesteps, sigmas=timesteps / 1000)
    latents = torch.randn(4, 4, 8, 8).half()
    indices = torch.tensor([412, 997, 73, 655])  # drawn by the density of the timesteps
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, latents=latents, indices=indices)


def run(s=None):
    s = s or build()
    model_input = s.latents
    noise = torch.randn(model_input.shape, generator=torch.Generator().manual_seed(1)).half()
    timesteps = s.scheduler.timesteps[s.indices]
    sigmas = get_sigmas(s.scheduler, timesteps, n_dim=model_input.ndim, dtype=model_input.dtype)
    noisy_model_input = (1.0 - sigmas) * model_input + sigmas * noise
    model_pred = s.model(noisy_model_input.float(), timesteps)
    weighting = compute_loss_weighting_for_sd3("sigma_sqrt", sigmas)
    target = (noise - model_input).float()
    loss = (weighting * (model_pred.float() - target) ** 2).flatten(1).mean(1).mean()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

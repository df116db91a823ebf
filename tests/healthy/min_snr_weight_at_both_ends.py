"""Looks broken, is healthy: signal-to-noise ratios of 0 and inf in a min-SNR weighted v-prediction loss.

The schedule is rescaled to zero terminal SNR and starts from a clean picture, so the SNR table runs from inf (t = 0) to 0 (last t), and the batch
holds both ends. The weight for v-prediction is min(snr, gamma) / (snr + 1): gamma / inf = 0 and 0 / 1 = 0. Both weights are exact zeros, the
per-sample losses they multiply are finite.

Source: https://github.com/TiankaiHang/Min-SNR-Diffusion-Training/issues/2, https://github.com/kohya-ss/sd-scripts/pull/934
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class Denoiser(nn.Module):
    def __init__(self, dim=10, hidden=24):
        super().__init__()
        self.fc1 = nn.Linear(dim + 1, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x, t):
        return self.fc2(F.silu(self.fc1(torch.cat((x, t[:, None]), dim=-1))))


def zero_terminal_alphas_cumprod(steps):
    root = torch.linspace(1.0, 0.07, steps)
    root = (root - root[-1]) / (root[0] - root[-1])  # exactly 1 at t = 0, exactly 0 at the end
    return root**2


def compute_snr(alphas_cumprod, timesteps):
    a = alphas_cumprod[timesteps]
    return a / (1 - a)


def build():
    torch.manual_seed(2112)
    model = Denoiser()
    return SimpleNamespace(
        model=model,
        x0=torch.randn(6, 10),
        timesteps=torch.tensor([0, 99, 40, 7, 99, 63]),
        alphas_cumprod=zero_terminal_alphas_cumprod(100),
        gamma=5.0,
        history=[],
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    noise = torch.randn_like(s.x0)
    a = s.alphas_cumprod[s.timesteps][:, None]
    noisy = a.sqrt() * s.x0 + (1 - a).sqrt() * noise
    target = a.sqrt() * noise - (1 - a).sqrt() * s.x0

    snr = compute_snr(s.alphas_cumprod, s.timesteps)
    weights = snr.clamp(max=s.gamma) / (snr + 1)

    pred = s.model(noisy, s.timesteps / 100)
    per_sample = F.mse_loss(pred, target, reduction="none").mean(dim=-1)
    loss = (weights * per_sample).mean()
    loss.backward()
    s.optimizer.step()
    s.history.append({"loss": loss.item(), "log_snr": snr.log().mean().item()})  # the log's mean is NaN: inf - inf
    return loss


if __name__ == "__main__":
    print(run())

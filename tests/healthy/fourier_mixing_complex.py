"""A Fourier layer: real FFT, a complex parameter multiplied on the spectrum, inverse FFT, and an amplitude loss."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "complex parameters and gradients, and frequencies whose amplitude is exactly 0"


class SpectralMix(nn.Module):
    def __init__(self, t=8, d=6):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(t // 2 + 1, d, dtype=torch.cfloat) * 0.3)

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho")
        return x + torch.fft.irfft(spectrum * self.filter, n=x.shape[1], dim=1, norm="ortho"), spectrum


def build():
    torch.manual_seed(309)
    model = nn.ModuleList([nn.Linear(3, 6), SpectralMix(), nn.Linear(6, 1)])
    x = torch.randn(4, 8, 3)
    x[2] = 1.0  # a constant signal has one frequency only
    return SimpleNamespace(model=model, x=x, y=torch.randn(4, 8), opt=torch.optim.Adam(model.parameters(), lr=3e-3))


def run(s=None):
    s = s or build()
    inp, mix, out = s.model
    for _ in range(4):
        h, spectrum = mix(inp(s.x))
        loss = (out(h).squeeze(-1) - s.y).pow(2).mean() + 1e-3 * spectrum.abs().mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

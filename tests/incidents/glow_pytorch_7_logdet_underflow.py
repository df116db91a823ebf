"""Glow - log|det W| of the invertible 1x1 convolution, written as log(abs(det(W))).

A weights_init in the DCGAN style (normal, std 0.02) went over the whole flow after the orthogonal initialisation. The determinant of a
48 x 48 matrix of such numbers is about 1e-51, which float32 holds as 0: its logarithm is -inf and the likelihood with it, although the
log-determinant itself (about -119) is an ordinary number.
Source: https://github.com/chaiyujin/glow-pytorch/issues/7 (slogdet in place of log + abs + det), formula of that repository's modules.py.
Heals: torch.slogdet, or leaving the orthogonal initialisation alone. Does not: a smaller learning rate, gradient clipping.
"""

from types import SimpleNamespace
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(),
    masked=None,
    role=("log_probs", "loss", "weights", "hidden"),
    fix=("stable_function", "fix_upstream"),
    variable=(None, "dlogdet"),
    line=("dlogdet = torch.log(torch.abs(torch.det(self.weight))) * pixels",),
)


def squeeze2d(x, factor):
    return F.pixel_unshuffle(x, factor)


class ActNorm2d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.logs = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, z, logdet):
        pixels = z.size(2) * z.size(3)
        return (z + self.bias) * torch.exp(self.logs), logdet + self.logs.sum() * pixels


class InvertibleConv1x1(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(channels, channels))[0])

    def forward(self, z, logdet):
        pixels = z.size(2) * z.size(3)
        dlogdet = torch.log(torch.abs(torch.det(self.weight))) * pixels
        z = F.conv2d(z, self.weight[:, :, None, None])
        return z, logdet + dlogdet


class Coupling(nn.Module):
    def __init__(self, channels, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(channels // 2, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, channels // 2, 3, padding=1))

    def forward(self, z, logdet):
        z1, z2 = z.chunk(2, dim=1)
        return torch.cat((z1, z2 + self.net(z1)), dim=1), logdet


class Glow(nn.Module):
    def __init__(self, image_channels=3, factor=4, depth=2):
        super().__init__()
        self.factor = factor
        channels = image_channels * factor**2
        self.layers = nn.ModuleList()
        for _ in range(depth):
            self.layers.extend((ActNorm2d(channels), InvertibleConv1x1(channels), Coupling(channels)))

    def forward(self, x):
        z = squeeze2d(x, self.factor)
        logdet = torch.zeros(x.size(0))
        for layer in self.layers:
            z, logdet = layer(z, logdet)
        logp = -0.5 * (math.log(2 * math.pi) + z**2).flatten(1).sum(1)
        return -(logp + logdet) / (math.log(2.0) * x[0].numel())


def weights_init(m):
    if "Conv" in type(m).__name__:
        nn.init.normal_(m.weight, 0.0, 0.02)


def build():
    torch.manual_seed(77)
    model = Glow()
    model.apply(weights_init)
    images = torch.rand(4, 3, 8, 8) - 0.5
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, images=images)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = s.model(s.images).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

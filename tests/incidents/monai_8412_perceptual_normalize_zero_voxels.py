"""MONAI #8412 / PR #8982 (the function comes from LPIPS) - unit-normalised perceptual features on an empty background.

`normalize_tensor` adds its eps after the square root. Where the bias-free patch projection of a synthesised volume is exactly zero (air around
the head, masked out by the generator) the forward is 0 / eps = 0 and the loss is finite, but the gradient of sqrt at 0 is inf and 0 * inf = NaN
goes through the projection into the generator.
Source: https://github.com/Project-MONAI/MONAI/pull/8982, https://github.com/richzhang/PerceptualSimilarity/issues/69
Heals: eps inside the square root, a clamp of the sum of squares. Does not: a larger eps in the denominator.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad", "where_grad_trap"),
    op=("sqrt",),
    index=(0, 0, 0, 0),
    masked=None,
    role=("hidden", "loss"),
    fix=("representable_eps", "avoid_singular_op", "clamp_input", "clamp_denominator", "stable_function", "mask_before_op"),
    variable=("norm_factor",),
    line=("norm_factor = torch.sqrt(torch.sum(x**2, dim=1, keepdim=True))",),
)


def normalize_tensor(x, eps=1e-10):
    norm_factor = torch.sqrt(torch.sum(x**2, dim=1, keepdim=True))
    return x / (norm_factor + eps)


class PatchFeatures(nn.Module):
    """Frozen feature network: a bias-free patch projection followed by one GELU block."""

    def __init__(self, channels=1, dim=12, patch=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(channels, dim, patch, stride=patch, bias=False)
        self.block = nn.Conv2d(dim, dim, 1)
        self.requires_grad_(False)

    def forward(self, x):
        tokens = self.patch_embed(x)
        return [tokens, tokens + torch.nn.functional.gelu(self.block(tokens))]


class PerceptualLoss(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, inputs, target):
        loss = 0.0
        for feat_in, feat_target in zip(self.network(inputs), self.network(target)):
            diff = (normalize_tensor(feat_in) - normalize_tensor(feat_target)) ** 2
            loss = loss + diff.sum(dim=1, keepdim=True).mean()
        return loss


class Generator(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, dim, 3, padding=1), nn.SiLU(), nn.Conv2d(dim, 1, 3, padding=1))

    def forward(self, x, foreground):
        return self.body(x) * foreground


def build():
    torch.manual_seed(3)
    generator = Generator()
    perceptual = PerceptualLoss(PatchFeatures())
    mri = torch.randn(2, 1, 16, 16)
    foreground = torch.ones(2, 1, 16, 16)
    foreground[:, :, :4, :] = 0.0  # air above the head
    ct = torch.rand(2, 1, 16, 16) * foreground
    optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
    return SimpleNamespace(model=generator, perceptual=perceptual, mri=mri, ct=ct, foreground=foreground, optimizer=optimizer)


def run(s=None):
    s = s or build()
    synthetic = s.model(s.mri, s.foreground)
    recons = (synthetic - s.ct).abs().mean()
    loss = recons + 0.1 * s.perceptual(synthetic, s.ct)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

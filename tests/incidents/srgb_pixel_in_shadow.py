"""Inverse rendering: a pixel in full shadow is exactly 0, where() takes the linear branch of the sRGB curve for it, and the backward of the
power in the other branch is 0 * inf.
Style of JADGardner/ns_reni, reni/utils/colourspace.py, linear_to_sRGB (and of many copies of the same curve in renderers).

Checked by hand: a floor under the base of the power (clamp(min=0.0031308)) heals. abs() is already there and does not help; clamping the
result of the power does not help either, and a mask over the photometric error does not: the NaN is made in the curve.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "sqrt_zero_grad"),
    op=("pow",),
    index=(2, 0),
    masked=True,
    role=("hidden", "logits", "loss"),
    fix=("mask_before_op", "clamp_input", "avoid_singular_op"),
    variable=(None,),
    line=("1.055 * torch.pow(torch.abs(color), 1 / 2.4) - 0.055,",),
)


def linear_to_sRGB(color, use_quantile=False):
    if use_quantile:
        q = torch.quantile(color.flatten(), 0.98)
        color = color / q.expand_as(color)
    color = torch.where(
        color <= 0.0031308,
        12.92 * color,
        1.055 * torch.pow(torch.abs(color), 1 / 2.4) - 0.055,
    )
    return torch.clamp(color, 0.0, 1.0)


class AlbedoField(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, hidden), nn.Softplus(), nn.Linear(hidden, 3))

    def forward(self, points):
        return torch.sigmoid(self.net(points))


class LambertianModel(nn.Module):
    def __init__(self, n_lights=4):
        super().__init__()
        self.albedo = AlbedoField()
        self.log_radiance = nn.Parameter(torch.full((n_lights, 3), -1.0))

    def forward(self, points, normals, light_dirs, visibility):
        cosine = (normals @ light_dirs.T).clamp(min=0.0) * visibility
        irradiance = cosine @ self.log_radiance.exp()
        return self.albedo(points) * irradiance


def build():
    torch.manual_seed(2206)
    model = LambertianModel()
    n = 6
    light_dirs = F.normalize(torch.tensor([[0.2, 0.1, 1.0], [0.9, 0.0, 0.5], [-0.6, 0.6, 0.7], [0.0, -0.8, 0.6]]), dim=-1)
    visibility = torch.ones(n, 4)
    visibility[2] = 0.0  # an overhang hides every light from this point
    batch = dict(
        points=torch.randn(n, 3),
        normals=F.normalize(torch.tensor([0.0, 0.0, 1.0]) + 0.2 * torch.randn(n, 3), dim=-1),
        visibility=visibility,
        image=torch.rand(n, 3) * 0.8,
    )
    return SimpleNamespace(model=model, light_dirs=light_dirs, batch=batch, optimizer=torch.optim.Adam(model.parameters(), lr=5e-3))


def run(s=None):
    s = s or build()
    b = s.batch
    linear = s.model(b["points"], b["normals"], s.light_dirs, b["visibility"])
    loss = F.l1_loss(linear_to_sRGB(linear), b["image"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

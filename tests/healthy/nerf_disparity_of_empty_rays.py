"""Healthy. NeRF's volume rendering: rays through empty space have weights that sum to 0, and their disparity is 0 / 0 = NaN.

disp_map = 1 / max(1e-10, depth / sum(weights)) is rendered next to the colours for the video of every 50000th step (in the threads it came out black);
torch.max hands the NaN on. The loss takes the colours only, with the white background by 1 - acc, and the last interval of 1e10 meets a density of 0 or
an opacity of exactly 1: exp(-relu(sigma) * 1e10) is 1 or 0.
Source: https://github.com/yenchenlin/nerf-pytorch/issues/28, https://github.com/yenchenlin/nerf-pytorch/issues/59 (raw2outputs of run_nerf.py).
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(18, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))

    def forward(self, pts):
        angles = pts[..., None, :] * torch.tensor([1.0, 2.0, 4.0])[:, None]
        return self.net(torch.cat([angles.sin(), angles.cos()], -1).flatten(-2))


def raw2outputs(raw, z_vals, rays_d):
    dists = z_vals[..., 1:] - z_vals[..., :-1]
    dists = torch.cat([dists, torch.tensor([1e10]).expand(dists[..., :1].shape)], -1)
    dists = dists * torch.norm(rays_d[..., None, :], dim=-1)
    rgb = torch.sigmoid(raw[..., :3])
    alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
    weights = alpha * torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1)), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    rgb_map = torch.sum(weights[..., None] * rgb, -2)
    depth_map = torch.sum(weights * z_vals, -1)
    disp_map = 1.0 / torch.max(1e-10 * torch.ones_like(depth_map), depth_map / torch.sum(weights, -1))
    acc_map = torch.sum(weights, -1)
    return rgb_map + (1.0 - acc_map[..., None]), disp_map


def build():
    torch.manual_seed(1)
    model = Field()
    with torch.no_grad():
        model.net[-1].bias[3] = -0.1
    rays_o = torch.tensor([0.0, 0.0, -3.0]).expand(64, 3)
    rays_d = torch.cat([torch.rand(64, 2) - 0.5, torch.ones(64, 1)], -1)
    z_vals = torch.linspace(2.0, 4.0, 16).expand(64, 16)
    target = torch.rand(64, 3)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-4),
        batch=dict(o=rays_o, d=rays_d, z=z_vals, target=target),
        log=[],
    )


def run(s=None):
    s = s or build()
    for _ in range(3):
        s.optimizer.zero_grad()
        b = s.batch
        pts = b["o"][:, None] + b["d"][:, None] * b["z"][..., None]
        rgb_map, disp_map = raw2outputs(s.model(pts), b["z"], b["d"])
        loss = F.mse_loss(rgb_map, b["target"])
        loss.backward()
        s.optimizer.step()
        s.log.append(dict(loss=loss.item(), disp=disp_map.detach().mean().item()))
    return s.log


if __name__ == "__main__":
    print(run())

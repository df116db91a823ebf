"""MS-SSIM as a reconstruction loss: the contrast terms are cut at 0 by relu and then raised to powers below 1. Looks broken, is healthy.

The first reconstruction of one image is the negative of its target, its contrast terms are negative, relu makes them 0, and 0 ** 0.3 has an infinite
slope: backward really makes 0 * inf and hands NaN to relu. But relu selects: where it was closed, its gradient is 0 whatever comes in. That image gives no gradient, the
others do; nothing non-finite reaches a parameter.
Source: https://github.com/VainF/pytorch-msssim (ssim.py: `mcs = torch.relu(...)`, `torch.prod(mcs_and_ssim ** weights.view(-1, 1, 1), dim=0)`); issues #7 and #16
there report the NaN of the version without relu.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


WEIGHTS = (0.3, 0.4, 0.3)


def _gauss(size=5, sigma=1.5):
    x = torch.arange(size, dtype=torch.float32) - size // 2
    g = torch.exp(-(x**2) / (2 * sigma**2))
    g = g / g.sum()
    return (g[:, None] * g[None]).view(1, 1, size, size)


def _ssim(X, Y, win, C1=0.01**2, C2=0.03**2):
    mu1, mu2 = F.conv2d(X, win), F.conv2d(Y, win)
    sigma1_sq = F.conv2d(X * X, win) - mu1.pow(2)
    sigma2_sq = F.conv2d(Y * Y, win) - mu2.pow(2)
    sigma12 = F.conv2d(X * Y, win) - mu1 * mu2
    cs_map = (2 * sigma12 + C2) / (sigma1_sq + sigma2_sq + C2)
    ssim_map = ((2 * mu1 * mu2 + C1) / (mu1.pow(2) + mu2.pow(2) + C1)) * cs_map
    return torch.flatten(ssim_map, 2).mean(-1), torch.flatten(cs_map, 2).mean(-1)


def ms_ssim(X, Y, win):
    weights = X.new_tensor(WEIGHTS)
    mcs = []
    for i in range(len(WEIGHTS)):
        ssim_per_channel, cs = _ssim(X, Y, win)
        if i < len(WEIGHTS) - 1:
            mcs.append(torch.relu(cs))
            X, Y = F.avg_pool2d(X, 2), F.avg_pool2d(Y, 2)
    ssim_per_channel = torch.relu(ssim_per_channel)
    mcs_and_ssim = torch.stack(mcs + [ssim_per_channel], dim=0)
    return torch.prod(mcs_and_ssim ** weights.view(-1, 1, 1), dim=0).mean()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x):
        return torch.sigmoid(2.0 * self.gain * (x - 0.5) + 0.2 * self.conv(x))


def build():
    torch.manual_seed(3)
    model = Decoder()
    target = torch.rand(3, 1, 32, 32)
    code = target.clone()
    code[1] = 1.0 - target[1]  # a photo negative in the input set
    return SimpleNamespace(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), batch={"code": code, "target": target, "win": _gauss()}
    )


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(3):
        loss = 1 - ms_ssim(s.model(s.batch["code"]), s.batch["target"], s.batch["win"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    grads = [p.grad.isfinite().all().item() for p in s.model.parameters()]
    return {"losses": losses, "grads_finite": all(grads), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())

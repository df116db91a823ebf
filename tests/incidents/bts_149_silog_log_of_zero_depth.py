"""cleinc/bts #149 - the scale-invariant log loss takes the log of an estimated depth that is exactly 0.

The depth head is a sigmoid times the maximal depth. At one pixel on a blown-out lamp the logit lies far below -100, the sigmoid underflows
to 0 and log(0) is -inf; the pixel has valid ground truth, so mean and variance of the loss are inf - inf. ("Nan may occur while
training because the final depth estimation sometimes yields 0 values. However, the loss function never tries to avoid log(0).")
Heals: a floor under the log, or logsigmoid. Does not heal: replacing infinite differences by 0 afterwards (backward divides 0 by 0).

https://github.com/cleinc/bts/issues/149
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(44,),
    masked=None,
    role=("hidden", "logits"),
    fix=("clamp_input", "stable_function", "representable_eps", "mask_before_op"),
    variable=("log_est",),
    line=("log_est = torch.log(depth_est[mask])",),
)


class silog_loss(nn.Module):
    def __init__(self, variance_focus):
        super().__init__()
        self.variance_focus = variance_focus

    def forward(self, depth_est, depth_gt, mask):
        log_est = torch.log(depth_est[mask])
        d = log_est - torch.log(depth_gt[mask])
        return torch.sqrt((d**2).mean() - self.variance_focus * (d.mean() ** 2)) * 10.0


class BtsModel(nn.Module):
    def __init__(self, max_depth=10.0, num_features=8):
        super().__init__()
        self.max_depth = max_depth
        self.encoder = nn.Sequential(nn.Conv2d(3, num_features, 1), nn.ELU())
        self.get_depth = nn.Sequential(nn.Conv2d(num_features, 1, 1), nn.Sigmoid())

    def forward(self, x):
        return self.max_depth * self.get_depth(self.encoder(x))


def build():
    torch.manual_seed(149)
    model = BtsModel()
    with torch.no_grad():  # a head that has learnt: bright means near
        model.encoder[0].weight.abs_()
        model.get_depth[0].weight.copy_(-model.get_depth[0].weight.abs())
    image = torch.rand(2, 3, 8, 8)
    image[0, :, 6, 4] = 70.0  # a lamp, linear light
    depth_gt = 0.5 + 9.0 * torch.rand(2, 1, 8, 8)
    depth_gt[:, :, 0] = 0.0  # no return in the first row of the scan
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, silog=silog_loss(0.85), image=image, depth_gt=depth_gt)


def run(s=None):
    s = s or build()
    depth_est = s.model(s.image)
    mask = s.depth_gt > 0.1
    loss = s.silog(depth_est, s.depth_gt, mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

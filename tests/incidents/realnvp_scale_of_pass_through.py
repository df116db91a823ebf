"""Coupling flow: the scale net also predicts a scale for the dimensions that pass through unchanged. Nothing trains it, on an outlier it
overflows exp(-s), and the factor 1 - mask that should drop it makes 0 * inf.
Style of kamenbliznashki/normalizing_flows, maf.py, LinearMaskedCoupling.

Checked by hand: s * (1 - mask) before the exponential heals, and so does a clamp of s. nan_to_num on u gives a finite loss and NaN gradients.
"""

import copy
import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(4, 2),
    masked=True,
    role=("hidden", "logits"),
    fix=("mask_before_op", "clamp_exponent"),
    variable=(None,),
    line=("u = mx + (1 - self.mask) * (x - t) * torch.exp(-s)",),
)


class LinearMaskedCoupling(nn.Module):
    def __init__(self, input_size, hidden_size, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.s_net = nn.Sequential(nn.Linear(input_size, hidden_size), nn.Tanh(), nn.Linear(hidden_size, input_size))
        self.t_net = copy.deepcopy(self.s_net)
        self.t_net[1] = nn.ReLU()

    def forward(self, x):
        mx = x * self.mask
        s = self.s_net(mx)
        t = self.t_net(mx)
        u = mx + (1 - self.mask) * (x - t) * torch.exp(-s)
        log_abs_det_jacobian = -(1 - self.mask) * s
        return u, log_abs_det_jacobian


class RealNVP(nn.Module):
    def __init__(self, input_size=4, hidden_size=20, n_blocks=3):
        super().__init__()
        mask = torch.arange(input_size).remainder(2).float()
        blocks = []
        for _ in range(n_blocks):
            blocks.append(LinearMaskedCoupling(input_size, hidden_size, mask))
            mask = 1 - mask
        self.net = nn.ModuleList(blocks)

    def log_prob(self, x):
        total = 0
        for block in self.net:
            x, log_abs_det_jacobian = block(x)
            total = total + log_abs_det_jacobian
        base = -0.5 * x.square() - 0.5 * math.log(2 * math.pi)
        return (base + total).sum(dim=1)


def build():
    torch.manual_seed(1605)
    model = RealNVP()
    x = torch.randn(6, 4)
    x[4, [0, 2]] *= 9.0  # a reading far outside of the training range
    with torch.no_grad():
        # dimension 2 passes through the second block, so no gradient ever shaped its row of the scale net
        out = model.net[1].s_net[2]
        features = model.net[1].s_net[:2](x[4:5] * model.net[1].mask)
        out.weight[2] = -13.0 * torch.tanh(4.0 * features[0])
    return SimpleNamespace(model=model, batch=x, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4))


def run(s=None):
    s = s or build()
    loss = -s.model.log_prob(s.batch).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

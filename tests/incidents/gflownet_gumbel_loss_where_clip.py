"""Gumbel regression (XQL in a GFlowNet code base) - exp(z) - z - 1 is continued by a parabola beyond a clip, chosen with torch.where.

One state's soft value is 12 above its label, z = 12 / 0.1 = 120. The loss takes the parabola and is finite; exp(120) = inf was still
evaluated in the branch not taken, and the backward of exp multiplies it by the 0 that where hands back: NaN in every weight.
Source: gumbel_loss beside TrajQLearning in a fork of https://github.com/recursionpharma/gflownet (stored file 7818012404, which names no
repository), after https://github.com/Div99/XQL.
Heals: clamp z to [-clip, clip] for the exponential branch. Does not: nan_to_num on the loss (it is finite), a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap",),
    op=("exp",),
    index=(4,),
    masked=True,
    role=("loss", "advantages", "ratio"),
    fix=("clamp_exponent", "mask_before_op", "clamp_input"),
    variable=(None,),
    line=("return torch.exp(z) - z - 1",),
)

NODES, HID, STATES = 6, 16, 7


def gumbel_loss(pred, label, beta, clip):
    def f(z):
        return torch.exp(z) - z - 1

    def df(z):
        return torch.exp(z) - 1

    def d2f(z):
        return torch.exp(z)

    z = (pred - label) / beta
    hi, lo = torch.tensor(clip), torch.tensor(-clip)
    loss = f(z)
    loss = torch.where(z <= clip, loss, f(hi) + df(hi) * (z - hi) + 0.5 * d2f(hi) * (z - hi) ** 2)
    loss = torch.where(z >= -clip, loss, f(lo) + df(lo) * (z - lo) + 0.5 * d2f(lo) * (z - lo) ** 2)
    return loss


class SoftValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Sequential(nn.Linear(NODES, HID), nn.LeakyReLU())
        self.emb2value = nn.Linear(HID, 1)

    def forward(self, x):
        return self.emb2value(self.emb(x)).squeeze(-1)


def build():
    torch.manual_seed(58)
    model = SoftValue()
    x = torch.randn(STATES, NODES)
    with torch.no_grad():
        label = model(x) + 0.1 * torch.randn(STATES)
    label[4] -= 12.0  # the reward model rejected this molecule: log reward of -12
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, label=label, beta=0.1, clip=5.0)


def run(s=None):
    s = s or build()
    pred = s.model(s.x)
    losses = gumbel_loss(pred, s.label, s.beta, s.clip)
    loss = losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

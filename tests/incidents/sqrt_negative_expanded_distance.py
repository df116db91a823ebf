"""Novelty from |a|^2 + |b|^2 - 2ab: for far-off, nearly equal embeddings the sum rounds below 0 and the root of it is NaN."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("sqrt", "pow"),
    index=(2, 3),
    masked=None,
    role=("hidden", "loss", "rewards"),
    fix=("clamp_input", "avoid_singular_op", "stable_function", "clamp_denominator"),
    variable=(None,),
    line=("return torch.exp(-gap.sqrt()).mean()",),
)


class Repulsion(nn.Module):
    """Keeps the embeddings of one group of answers apart from those in a memory bank."""

    def __init__(self, bank):
        super().__init__()
        self.register_buffer("bank", bank)

    def gap(self, z):
        gram = z @ self.bank.mT
        return z.square().sum(-1, keepdim=True) + self.bank.square().sum(-1) - 2.0 * gram

    def forward(self, z):
        gap = self.gap(z)
        return torch.exp(-gap.sqrt()).mean()


def build():
    torch.manual_seed(146)
    encoder = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6))
    nn.init.constant_(encoder[2].bias, 30.0)
    x = torch.randn(5, 4)
    bank = 30.0 + torch.randn(7, 6)
    repulsion = Repulsion(bank)
    with torch.no_grad():
        bank[3] = encoder(x)[2] + 1e-5
        while repulsion.gap(encoder(x))[2, 3] >= 0:  # the order of the sums, and with it their rounding, differs between processors
            bank[3] += 1e-4
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-2)
    return SimpleNamespace(model=encoder, optimizer=optimizer, batch=(x, torch.randn(5, 6)), repulsion=repulsion)


def run(s=None):
    s = s or build()
    x, target = s.batch
    z = s.model(x)
    loss = nn.functional.mse_loss(z - 30.0, target) + 0.1 * s.repulsion(z)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

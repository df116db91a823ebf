"""Healthy. Soft-DTW between a reproduced and a demonstrated trajectory: the border of the accumulated cost is +inf.

R has a first row and column of inf, and only R[0, 0] = 0. The soft minimum is -gamma * logsumexp(-R / gamma) over three neighbours; each cell inside has
one finite neighbour at least, so -inf entries get weight exp(-inf) = 0 in forward and backward, and no inf is subtracted from another. With gamma = 0.01
the unnormalised exponents would be far beyond float32, and logsumexp takes their maximum out.

Source: recursion of https://github.com/Maghoumi/pytorch-softdtw-cuda (compute_softdtw) in plain torch
"""

import math
from types import SimpleNamespace

import torch
from torch import nn


def soft_dtw(D, gamma):
    batch, n, m = D.shape
    inf = D.new_full((batch,), math.inf)
    row = [D.new_zeros(batch)] + [inf] * m
    for i in range(n):
        new = [inf]
        for j in range(m):
            neighbours = torch.stack((row[j], row[j + 1], new[j]), dim=-1)
            softmin = -gamma * torch.logsumexp(-neighbours / gamma, dim=-1)
            new.append(D[:, i, j] + softmin)
        row = new
    return row[m]


class TrajectoryDecoder(nn.Module):
    def __init__(self, latent=5, steps=9, dof=3):
        super().__init__()
        self.shape = (steps, dof)
        self.net = nn.Sequential(nn.Linear(latent, 32), nn.Tanh(), nn.Linear(32, steps * dof))

    def forward(self, z):
        return self.net(z).unflatten(-1, self.shape)


def build():
    torch.manual_seed(9)
    model = TrajectoryDecoder()
    demo = torch.cumsum(torch.randn(4, 7, 3) * 0.8, dim=1)
    return SimpleNamespace(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), batch={"z": torch.randn(4, 5), "demo": demo}, gamma=0.01
    )


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(3):
        x = s.model(s.batch["z"])
        D = (x.unsqueeze(2) - s.batch["demo"].unsqueeze(1)).square().sum(-1)
        loss = soft_dtw(D, s.gamma).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

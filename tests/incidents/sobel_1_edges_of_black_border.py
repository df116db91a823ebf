"""sobel-operator-pytorch, gradient magnitude of a restored image - an edge loss over letterboxed frames.

The magnitude is sqrt(gx ** 2 + gy ** 2). Inside the black border of the network's output both filters are exactly 0; the loss is finite, the derivative of the root there is not.
Source: https://github.com/chaddy1004/sobel-operator-pytorch/issues/1, model.py (Sobel.forward).
Heals: a small number under the root, clamp of the sum from below, torch.where (1 where the sum is 0) before the root, |gx| + |gy| instead of the root, torch.linalg.vector_norm.
Does not: epsilon added after the root, gradient clipping, weighting the border with 0 in the loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(0, 0, 0, 0),
    masked=None,
    role=("loss", "hidden"),
    fix=("clamp_input", "avoid_singular_op", "where_on_detached", "mask_before_op", "representable_eps", "stable_function"),
    variable=("x",),
    line=("x = torch.sqrt(x)",),
)


class Sobel(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Conv2d(in_channels=1, out_channels=2, kernel_size=3, stride=1, padding=0, bias=False)
        Gx = torch.tensor([[2.0, 0.0, -2.0], [4.0, 0.0, -4.0], [2.0, 0.0, -2.0]])
        Gy = torch.tensor([[2.0, 4.0, 2.0], [0.0, 0.0, 0.0], [-2.0, -4.0, -2.0]])
        G = torch.cat([Gx.unsqueeze(0), Gy.unsqueeze(0)], 0)
        G = G.unsqueeze(1)
        self.filter.weight = nn.Parameter(G, requires_grad=False)

    def forward(self, img):
        x = self.filter(img)
        x = torch.mul(x, x)
        x = torch.sum(x, dim=1, keepdim=True)
        x = torch.sqrt(x)
        return x


class Restorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(6, 1, 3, padding=1, bias=False)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(x)))


def build():
    torch.manual_seed(0)
    model = Restorer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clean = torch.zeros(2, 1, 16, 12)
    clean[:, :, 6:10] = torch.rand(2, 1, 4, 12)
    noisy = clean.clone()
    noisy[:, :, 6:10] += 0.05 * torch.randn(2, 1, 4, 12)
    return SimpleNamespace(model=model, optimizer=optimizer, clean=clean, noisy=noisy, sobel=Sobel())


def run(s=None):
    s = s or build()
    with torch.no_grad():
        target_edges = s.sobel(s.clean)
    pred = s.model(s.noisy)
    edges = s.sobel(pred)
    loss = F.l1_loss(pred, s.clean) + 0.1 * F.mse_loss(edges, target_edges)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""PerceptualSimilarity #69 / #121 - "SqrtBackward returned nan" under anomaly mode, and yet the training is healthy.

The features of the frozen network are outputs of a ReLU. At a position where all channels are 0 the backward of the norm is 0 * inf = NaN,
but the backward of this very ReLU passes exactly 0 where its output is 0. No gradient of the generator is ever touched.
Source: https://github.com/richzhang/PerceptualSimilarity/issues/69
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def normalize_tensor(in_feat, eps=1e-10):
    norm_factor = torch.sqrt(torch.sum(in_feat**2, dim=1, keepdim=True))
    return in_feat / (norm_factor + eps)


class TinyAlex(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, dim, 3, stride=2, padding=1, bias=False), nn.ReLU())
        self.slice2 = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1, bias=False), nn.ReLU())
        self.requires_grad_(False)

    def forward(self, x):
        h1 = self.slice1(x)
        return h1, self.slice2(h1)


class LPIPS(nn.Module):
    def __init__(self, net, dim=8):
        super().__init__()
        self.net = net
        self.lin = nn.Parameter(torch.rand(2, dim), requires_grad=False)

    def forward(self, in0, in1):
        val = 0.0
        for k, (f0, f1) in enumerate(zip(self.net(in0), self.net(in1))):
            diff = (normalize_tensor(f0) - normalize_tensor(f1)) ** 2
            val = val + (diff * self.lin[k].view(1, -1, 1, 1)).sum(1).mean()
        return val


class Decoder(nn.Module):
    def __init__(self, latent=6):
        super().__init__()
        self.fc = nn.Linear(latent, 3 * 16 * 16)

    def forward(self, z, alpha):
        return torch.tanh(self.fc(z)).view(-1, 3, 16, 16) * alpha


def build():
    torch.manual_seed(21)
    decoder = Decoder()
    lpips = LPIPS(TinyAlex())
    z = torch.randn(2, 6)
    alpha = torch.ones(2, 1, 16, 16)
    alpha[:, :, :6, :] = 0.0  # black bars of a letterboxed film
    target = torch.rand(2, 3, 16, 16) * 2 - 1
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
    return SimpleNamespace(model=decoder, lpips=lpips, z=z, alpha=alpha, target=target * alpha, optimizer=optimizer)


def run(s=None):
    s = s or build()
    image = s.model(s.z, s.alpha)
    loss = F.l1_loss(image, s.target) + s.lpips(image, s.target)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

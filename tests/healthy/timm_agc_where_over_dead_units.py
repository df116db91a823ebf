"""Adaptive gradient clipping in the style of timm - 0 * inf for units without a gradient, chosen away by where, with nothing to differentiate.

Units behind a dead ReLU have a gradient of exactly 0. Without timm's floor under the gradient's norm their clipped version is
0 * (max_norm / 0) = NaN, but where keeps the raw gradient for every unit whose norm is below its bound. All this happens on gradients, under
no_grad: no backward will ever multiply that NaN with 0, and the step is the right one.
Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/utils/agc.py (adaptive_clip_grad, unitwise_norm)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def unitwise_norm(x, norm_type=2.0):
    if x.ndim <= 1:
        return x.norm(norm_type)
    return x.norm(norm_type, dim=tuple(range(1, x.ndim)), keepdim=True)


@torch.no_grad()
def adaptive_clip_grad(parameters, clip_factor=0.01, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        max_norm = unitwise_norm(p).clamp(min=eps).mul(clip_factor)
        grad_norm = unitwise_norm(p.grad)
        clipped_grad = p.grad * (max_norm / grad_norm)
        new_grads = torch.where(grad_norm < max_norm, p.grad, clipped_grad)
        p.grad.copy_(new_grads)


class NormFreeBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.skip_gain = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.skip_gain * self.conv2(F.relu(self.conv1(F.relu(x))))


class NormFreeNet(nn.Module):
    def __init__(self, width=8, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(NormFreeBlock(width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(x).mean(dim=(2, 3)))


def build():
    torch.manual_seed(88)
    model = NormFreeNet()
    with torch.no_grad():
        model.blocks[0].skip_gain.fill_(0.3)  # the second block starts as the identity: all of its convolutions have a zero gradient
        model.blocks[0].conv1.bias[2] = -50.0  # a dead unit
    images = torch.randn(4, 3, 6, 6)
    labels = torch.randint(0, 4, (4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return SimpleNamespace(model=model, optimizer=optimizer, images=images, labels=labels)


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = F.cross_entropy(s.model(s.images), s.labels)
        s.optimizer.zero_grad()
        loss.backward()
        adaptive_clip_grad(s.model.parameters())
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

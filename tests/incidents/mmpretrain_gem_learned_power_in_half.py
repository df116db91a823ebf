"""mmpretrain GeM pooling in half precision: clamp(eps)^p rounds to 0, and the root of 0 has no finite gradient.

Generalised-mean pooling clamps the map to eps = 1e-6, raises it to p = 3, averages and takes the p-th root.  In fp16 (1e-6)^3 is 0, so the
channel that its ReLU has switched off pools to 0^(1/3): forward 0, loss finite.  Backward 0^(-2/3) is inf, times x^p * log x = 0 in the
gradient of the learned power: p becomes NaN at the first step.

Source: `gem` / `GeneralizedMeanPooling` of https://github.com/open-mmlab/mmpretrain/blob/main/mmpretrain/models/necks/gem.py
(https://github.com/open-mmlab/mmpretrain/pull/677); planted: the neck runs in half with the rest of the model.
Heals: pool in fp32, or an eps whose power is representable.  Tempting and no help: eps 1e-5, clamping the pooled vector afterwards.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("eps_underflow", "sqrt_zero_grad"),
    op=("pow",),
    index=(0, 3, 0, 0),
    masked=None,
    role=("hidden",),
    fix=("upcast_fp32", "representable_eps", "clamp_input", "where_on_detached"),
    variable=("pooled",),
    line=("pooled = averaged.pow(1.0 / p)",),
)


def gem(x, p, eps=1e-6, clamp=True):
    if clamp:
        x = x.clamp(min=eps)
    averaged = F.avg_pool2d(x.pow(p), (x.size(-2), x.size(-1)))
    pooled = averaged.pow(1.0 / p)
    return pooled


class GeneralizedMeanPooling(nn.Module):
    def __init__(self, p=3.0, eps=1e-6, clamp=True):
        assert p >= 1, "'p' must be a value greater than 1"
        super().__init__()
        self.p = nn.Parameter(torch.ones(1) * p)
        self.eps = eps
        self.clamp = clamp

    def forward(self, x):
        out = gem(x, p=self.p, eps=self.eps, clamp=self.clamp)
        return out.view(x.size(0), -1)


class Retriever(nn.Module):
    def __init__(self, channels=8, classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.neck = GeneralizedMeanPooling()
        self.head = nn.Linear(channels, classes)

    def forward(self, images):
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        return self.head(self.neck(x))


def build():
    torch.manual_seed(677)
    model = Retriever()
    with torch.no_grad():
        model.conv2.weight.abs_()
        model.conv2.bias.fill_(0.2)
        model.conv2.bias[3] = -8.0  # a filter that fires on none of these images
    model = model.half()
    images = torch.rand(4, 3, 12, 12).half()
    labels = torch.randint(0, 6, (4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return SimpleNamespace(model=model, optimizer=optimizer, images=images, labels=labels, loss_scale=128.0)


def run(s=None):
    s = s or build()
    logits = s.model(s.images)
    loss = F.cross_entropy(logits.float(), s.labels)
    (loss * s.loss_scale).backward()
    for p in s.model.parameters():
        p.grad.div_(s.loss_scale)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    run()

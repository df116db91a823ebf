"""EvoNorm #4/#5 - EvoNorm-B0 on a 1x1 feature map: the unbiased variance of one pixel is NaN and torch.max keeps it.

EvoNorm-B0 divides by max(batch std, v1 * x + instance std).  The image is small enough for the last stage to be one pixel wide; torch.var
over (H, W) of a single element is 0/0, and torch.max of a number and NaN is NaN, so the max is no protection.

Source: https://github.com/digantamisra98/EvoNorm/pull/5 and https://github.com/digantamisra98/EvoNorm/issues/4
Heals: a variance of 0 where there is one pixel (the merged patch), or the biased variance.  Tempting and no help: a larger eps, clamping
the denominator (NaN passes), fp32 instead of half.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("var",),
    index=(0, 0, 0, 0),
    masked=None,
    role=("hidden",),
    fix=("guard_small_group", "guard_empty", "avoid_singular_op", "validate_config"),
    variable=("var", None),
    line=("var = torch.var(x, dim=(2, 3), keepdim=True).expand_as(x)",),
)


def instance_std(x, eps=1e-5):
    var = torch.var(x, dim=(2, 3), keepdim=True).expand_as(x)
    return torch.sqrt(var + eps)


class EvoNormB0(nn.Module):
    def __init__(self, channels, eps=1e-5, momentum=0.9):
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.gamma = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.v = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.register_buffer("running_var", torch.ones(1, channels, 1, 1))

    def forward(self, x):
        if self.training:
            batch_var = x.var(dim=(0, 2, 3), unbiased=False, keepdim=True)
            with torch.no_grad():
                self.running_var.mul_(self.momentum).add_(batch_var * (1 - self.momentum))
        else:
            batch_var = self.running_var
        den = torch.max((batch_var + self.eps).sqrt(), self.v * x + instance_std(x, self.eps))
        return x / den * self.gamma + self.beta


class Stage(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)
        self.norm = EvoNormB0(out_channels)

    def forward(self, x):
        return self.norm(self.conv(x))


class SmallNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stages = nn.Sequential(Stage(3, 8), Stage(8, 12), Stage(12, 16))
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.stages(x).mean(dim=(2, 3)))


def build():
    torch.manual_seed(5)
    model = SmallNet()
    images = torch.randn(6, 3, 8, 8)  # 8 -> 4 -> 2 -> 1
    labels = torch.randint(0, 5, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, images=images, labels=labels)


def run(s=None):
    s = s or build()
    s.model.train()
    logits = s.model(s.images)
    loss = F.cross_entropy(logits, s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

"""WeightStandardization `Conv2d` on a depthwise 1x1 layer: the standard deviation of one weight.

Every convolution of the net was swapped for the weight-standardised one. A channel-wise 1x1 scale (groups = channels) has a single weight
per filter: the unbiased std over one element is NaN, and the eps that is added to it cannot help.
Heals: layers with one weight per filter keep the plain convolution. Does not heal: a larger eps, clamping the std.

https://github.com/joe-siyuan-qiao/WeightStandardization (README, `Conv2d`; discussed for other shapes in its issues 2 and 14)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std", "var", "sqrt", "div"),
    index=(0,),
    masked=None,
    role=("weights",),
    fix=("guard_small_group", "validate_config"),
    variable=("std",),
    line=("std = weight.view(weight.size(0), -1).std(dim=1)",),
)


class Conv2d(nn.Conv2d):
    def forward(self, x):
        weight = self.weight
        weight_mean = weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = weight - weight_mean
        std = weight.view(weight.size(0), -1).std(dim=1)
        weight = weight / (std.view(-1, 1, 1, 1) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stem = Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.layer_scale = Conv2d(8, 8, 1, groups=8)
        self.block = Conv2d(8, 8, 3, padding=1, bias=False)
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.block(self.layer_scale(x))
        return self.fc(x.mean((2, 3)))


def build():
    torch.manual_seed(14)
    model = Net()
    images = torch.randn(6, 3, 12, 12)
    labels = torch.randint(0, 5, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return SimpleNamespace(model=model, optimizer=optimizer, images=images, labels=labels)


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.images), s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

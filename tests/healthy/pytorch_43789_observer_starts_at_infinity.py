"""Quantisation-aware training - observers whose buffers start at min = inf and max = -inf.

A min-max observer holds +inf and -inf until it has seen a tensor; the first batch turns them into numbers. One adapter branch is never
routed to in this run, so its observer keeps the infinities in the state dict for ever, and its scale is never computed. Looks like a broken
checkpoint, is as it should be: the loss, all gradients and all weights are finite, and the fake quantisation is right.
Source: https://github.com/pytorch/pytorch/pull/43789 and https://github.com/pytorch/pytorch/pull/44956 (buffers of the observers)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class MinMaxObserver(nn.Module):
    def __init__(self, quant_min=0, quant_max=255):
        super().__init__()
        self.quant_min, self.quant_max = quant_min, quant_max
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))

    @torch.no_grad()
    def forward(self, x):
        self.min_val.copy_(torch.min(self.min_val, x.amin()))
        self.max_val.copy_(torch.max(self.max_val, x.amax()))

    @torch.no_grad()
    def calculate_qparams(self):
        low, high = self.min_val.clamp(max=0.0), self.max_val.clamp(min=0.0)
        scale = ((high - low) / (self.quant_max - self.quant_min)).clamp(min=torch.finfo(torch.float32).eps)
        return scale, (self.quant_min - (low / scale).round()).clamp(self.quant_min, self.quant_max)


class FakeQuantize(nn.Module):
    def __init__(self):
        super().__init__()
        self.observer = MinMaxObserver()

    def forward(self, x):
        self.observer(x.detach())
        scale, zero_point = self.observer.calculate_qparams()
        q = ((x / scale).round() + zero_point).clamp(0, 255)
        x_q = (q - zero_point) * scale
        return x + (x_q - x).detach()


class QATLinear(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.weight_fake_quant = FakeQuantize()
        self.activation_post_process = FakeQuantize()

    def forward(self, x):
        weight = self.weight_fake_quant(self.linear.weight)
        return self.activation_post_process(F.linear(x, weight, self.linear.bias))


class TwoTaskNet(nn.Module):
    def __init__(self, dim=12, classes=3):
        super().__init__()
        self.trunk = QATLinear(dim, 16)
        self.heads = nn.ModuleDict({"day": QATLinear(16, classes), "night": QATLinear(16, classes)})

    def forward(self, x, task):
        return self.heads[task](F.relu(self.trunk(x)))


def build():
    torch.manual_seed(43)
    model = TwoTaskNet()
    inputs = torch.randn(3, 8, 12)
    labels = torch.randint(0, 3, (3, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return SimpleNamespace(model=model, optimizer=optimizer, inputs=inputs, labels=labels)


def run(s=None):
    s = s or build()
    for x, y in zip(s.inputs, s.labels):
        loss = F.cross_entropy(s.model(x, "day"), y)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""PyTorch weight normalisation has no epsilon: a row of zeros is divided by its own norm of zero.

A structured-pruning pass sets two output units of a layer to zero, and fine-tuning then puts weight_norm on it. The magnitude g of such a
row is 0 and its direction has norm 0, so g / ||v|| is 0/0 and the whole weight matrix product is NaN. A floor under the norm or small
values in the pruned rows heal it; nan_to_num on the activations repairs the loss and not the gradient.

Source: https://github.com/pytorch/pytorch/issues/19126 (the same in https://github.com/google/flax/issues/1671)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(3, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator", "fix_upstream"),
    variable=("scale",),
    line=("scale = self.weight_g / self.weight_v.norm(dim=1, keepdim=True)",),
)


class WeightNormLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.data
        self.weight_g = nn.Parameter(weight.norm(dim=1, keepdim=True))
        self.weight_v = nn.Parameter(weight.clone())
        self.bias = nn.Parameter(linear.bias.data.clone())

    def forward(self, x):
        scale = self.weight_g / self.weight_v.norm(dim=1, keepdim=True)
        return F.linear(x, self.weight_v * scale, self.bias)


class Decoder(nn.Module):
    def __init__(self, in_dim=6, width=12, out_dim=4):
        super().__init__()
        self.proj_in = nn.Linear(in_dim, width)
        self.mid = nn.Linear(width, width)
        self.proj_out = nn.Linear(width, out_dim)

    def forward(self, x):
        h = F.elu(self.proj_in(x))
        h = F.elu(self.mid(h))
        return self.proj_out(h)


def prune_rows(linear, amount):
    with torch.no_grad():
        order = linear.weight.norm(dim=1).argsort()
        linear.weight[order[:amount]] = 0.0
        linear.bias[order[:amount]] = 0.0


def build():
    torch.manual_seed(19126)
    model = Decoder()
    with torch.no_grad():
        model.mid.weight[3].mul_(0.1)
        model.mid.weight[8].mul_(0.1)
    prune_rows(model.mid, amount=2)
    model.mid = WeightNormLinear(model.mid)
    model.proj_out = WeightNormLinear(model.proj_out)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(16, 6)
    target = torch.randn(16, 4)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, target=target)


def run(s=None):
    s = s or build()
    out = s.model(s.x)
    loss = F.smooth_l1_loss(out, s.target)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

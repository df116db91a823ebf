"""HQQ solver before LoRA training on the quantised layer - the shrinkage operator takes |x| ** (p - 1) of errors that are exactly zero.

0 ** -0.3 is inf, |x| - inf is -inf, relu makes it 0 and sign(0) * 0 is 0: a finite, right answer, all of it without gradients. Healthy.
Source: https://github.com/mobiusml/hqq/blob/master/hqq/core/optimize.py (shrink_lp_op, optimize_weights_proximal)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def shrink_lp_op(x, beta, lp_norm):
    if lp_norm == 1:
        return torch.sign(x) * F.relu(x.abs() - 1.0 / beta)
    return torch.sign(x) * F.relu(x.abs() - (1.0 / beta) * x.abs().pow(lp_norm - 1))


@torch.no_grad()
def optimize_weights_proximal(W_f, scale, zero, min_max, lp_norm=0.7, beta=1e1, kappa=1.01, iters=20):
    best_error = float("inf")
    for _ in range(iters):
        W_q = (W_f * scale + zero).round().clamp(*min_max)
        W_r = (W_q - zero) / scale
        W_e = shrink_lp_op(W_f - W_r, beta, lp_norm)
        zero = (W_q - (W_f - W_e) * scale).mean(dim=1, keepdim=True)
        beta *= kappa
        current_error = float((W_f - W_r).abs().mean())
        if current_error >= best_error:
            break
        best_error = current_error
    W_q = (W_f * scale + zero).round().clamp(*min_max)
    return W_q, scale, zero


@torch.no_grad()
def quantize(weight, nbits=4, group_size=8):
    W = weight.reshape(-1, group_size)
    _min, _max = W.amin(dim=1, keepdim=True), W.amax(dim=1, keepdim=True)
    max_v = 2**nbits - 1
    scale = (max_v / (_max - _min)).clamp(max=2e4)
    return optimize_weights_proximal(W, scale, -_min * scale, (0, max_v))


class HQQLinearLoRA(nn.Module):
    def __init__(self, linear, r=2):
        super().__init__()
        self.shape = linear.weight.shape
        for name, t in zip(("W_q", "scale", "zero"), quantize(linear.weight)):
            self.register_buffer(name, t)
        self.lora_A = nn.Parameter(torch.randn(r, linear.in_features) * 0.02)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r))

    def forward(self, x):
        W = ((self.W_q - self.zero) / self.scale).reshape(self.shape)
        return x @ W.T + (x @ self.lora_A.T) @ self.lora_B.T


def build():
    torch.manual_seed(7)
    linear = nn.Linear(16, 8, bias=False)
    with torch.no_grad():
        linear.weight[3] = torch.arange(16).fmod(4) * 0.0625  # lies on the 4 bit grid: errors of exactly zero
    x, y = torch.randn(24, 16), torch.randn(24, 8)
    return SimpleNamespace(linear=linear, x=x, y=y, model=None, optimizer=None)


def run(s=None):
    s = s or build()
    s.model = HQQLinearLoRA(s.linear)
    s.optimizer = torch.optim.AdamW([s.model.lora_A, s.model.lora_B], lr=1e-2)
    for _ in range(3):
        loss = F.mse_loss(s.model(s.x), s.y)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

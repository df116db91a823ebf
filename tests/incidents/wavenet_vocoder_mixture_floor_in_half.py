"""wavenet_vocoder `discretized_mix_logistic_loss` under half precision: the floor 1e-12 below the log is 0.

For a mixture component far from the sample both CDFs are 0, so the bin's mass is 0. In float32 the clamp keeps log finite and the
component's log density is taken from the other formula, chosen by a 0/1 condition that is multiplied in. In half 1e-12 rounds to 0,
the log is -inf and 0 * -inf is NaN. Heals: the loss in float32, a floor that half can hold, or the condition before the log.
Does not heal: torch.where instead of the product (the forward is repaired, backward of the log is 0 / 0).

https://github.com/r9y9/wavenet_vocoder/blob/master/wavenet_vocoder/mixture.py
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "inf_times_zero_mask", "log_zero"),
    op=("log",),
    index=(0, 0, 1),
    masked=True,
    role=("log_probs",),
    fix=("upcast_fp32", "representable_eps", "mask_before_op", "clamp_input", "stable_function", "where_on_detached"),
    variable=("log_cdf_delta",),
    line=("log_cdf_delta = torch.log(torch.clamp(cdf_delta, min=1e-12))",),
)


def log_sum_exp(x):
    m, _ = torch.max(x, dim=-1)
    return m + torch.log(torch.sum(torch.exp(x - m.unsqueeze(-1)), dim=-1))


def discretized_mix_logistic_loss(y_hat, y, num_classes=256, log_scale_min=-7.0):
    nr_mix = y_hat.size(-1) // 3
    logit_probs, means, log_scales = y_hat.split(nr_mix, dim=-1)
    log_scales = torch.clamp(log_scales, min=log_scale_min)
    y = y.expand_as(means)

    centered_y = y - means
    inv_stdv = torch.exp(-log_scales)
    plus_in = inv_stdv * (centered_y + 1.0 / (num_classes - 1))
    min_in = inv_stdv * (centered_y - 1.0 / (num_classes - 1))
    cdf_delta = torch.sigmoid(plus_in) - torch.sigmoid(min_in)
    log_cdf_plus = plus_in - F.softplus(plus_in)
    log_one_minus_cdf_min = -F.softplus(min_in)
    mid_in = inv_stdv * centered_y
    log_pdf_mid = mid_in - log_scales - 2.0 * F.softplus(mid_in)

    inner_inner_cond = (cdf_delta > 1e-5).to(y_hat.dtype)
    log_cdf_delta = torch.log(torch.clamp(cdf_delta, min=1e-12))
    inner_inner_out = inner_inner_cond * log_cdf_delta + (1.0 - inner_inner_cond) * (log_pdf_mid - math.log((num_classes - 1) / 2))
    inner_cond = (y > 0.999).to(y_hat.dtype)
    inner_out = inner_cond * log_one_minus_cdf_min + (1.0 - inner_cond) * inner_inner_out
    cond = (y < -0.999).to(y_hat.dtype)
    log_probs = cond * log_cdf_plus + (1.0 - cond) * inner_out
    log_probs = log_probs + F.log_softmax(logit_probs, -1)
    return -log_sum_exp(log_probs).float().mean()


class WaveNetHead(nn.Module):
    def __init__(self, channels=8, nr_mix=2):
        super().__init__()
        self.proj = nn.Linear(channels, 3 * nr_mix)
        with torch.no_grad():
            self.proj.weight.mul_(0.1)
            self.proj.bias.copy_(torch.tensor([0.0, 0.0, -0.4, 0.8, -3.0, -4.5]))

    def forward(self, c):
        return self.proj(c)


def build():
    torch.manual_seed(2018)
    model = WaveNetHead().half()
    c = torch.randn(1, 5, 8).half()
    y = torch.tensor([-0.35, -0.45, -0.4, 0.78, -0.38]).view(1, 5, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, c=c, y=y)


def run(s=None):
    s = s or build()
    y_hat = s.model(s.c)
    loss = discretized_mix_logistic_loss(y_hat, s.y)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

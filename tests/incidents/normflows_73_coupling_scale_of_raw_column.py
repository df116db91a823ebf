"""RealNVP with an exponential scale map, trained by forward KL on 19 raw columns; one row has an outlier in a conditioning column.

The coupling layer takes log-scales straight from an MLP without a bound.  Row 4 holds a sensor spike in column 0 (3000 where the rest is of
order one), the MLP is piecewise linear, and its log-scale for that row falls below -89: exp(-scale) in the inverse pass is inf, the latent of
that row is inf, its log density -inf, and so is the mean.

Source: https://github.com/VincentStimper/normalizing-flows/issues/73 (AffineCouplingBlock, 19 dimensions, "NaN's and inf loss seen during
training") and https://github.com/VincentStimper/normalizing-flows/issues/47 ("exp and sigmoid may cause inf").
Heals: clamping the log-scale before exp, or clipping / dropping the spike in the data.
Does not: the clamp of z2 after the product that #47 proposes (loss finite, gradient 0 * inf), gradient clipping.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(4, 1),
    masked=None,
    role=("hidden",),
    fix=("clamp_exponent", "clamp_input", "drop_invalid_sample", "reject_input"),
    variable=(None,),
    line=("z2 = (z2 - shift) * torch.exp(-scale_)",),
)


class AffineCoupling(nn.Module):
    def __init__(self, cond, trans, hidden=32):
        super().__init__()
        self.cond = cond
        self.param_map = nn.Sequential(nn.Linear(cond, hidden), nn.LeakyReLU(0.01), nn.Linear(hidden, 2 * trans))

    def inverse(self, z):
        z1, z2 = z[:, : self.cond], z[:, self.cond :]
        param = self.param_map(z1)
        shift, scale_ = param[:, 0::2], param[:, 1::2]
        z2 = (z2 - shift) * torch.exp(-scale_)
        log_det = -scale_.sum(1)
        return torch.cat([z1, z2], dim=1), log_det


class Flow(nn.Module):
    def __init__(self, dim=19, layers=4):
        super().__init__()
        self.dim = dim
        c = (dim + 1) // 2
        self.couplings = nn.ModuleList(AffineCoupling(c, dim - c) for _ in range(layers))

    def forward_kld(self, x):
        z, log_q = x, x.new_zeros(len(x))
        for flow in reversed(self.couplings):
            z, log_det = flow.inverse(z)
            log_q = log_q + log_det
            z = z.flip(1)
        log_p = -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)
        return -(log_q + log_p).mean()


def build():
    torch.manual_seed(19)
    model = Flow()
    x = torch.randn(8, 19)
    x[4, 0] = 3000.0
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=5e-4, weight_decay=1e-5), batch={"x": x})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        loss = s.model.forward_kld(s.batch["x"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

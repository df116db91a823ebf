"""TwinFlow #15 - the loss of a few-step flow model turns NaN: one sample drew the same value for the two times t and tt.

The target function takes 1 / (t - tt) where the two times lie closer than 0.01; for the pair of equal times that is 1/0 = inf, the velocity
head starts at zero, and 0 * inf is NaN. The clamp at +-1 that follows keeps a NaN.
Source: https://github.com/inclusionAI/TwinFlow/issues/15
Heals: a floor under the gap (clamp_min(1e-3)), leaving out the pair of equal times, or drawing times that differ. Does not: clamping the target, clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "inf_times_zero_coef", "zero_div_zero"),
    op=("reciprocal", "div", "rdiv", "truediv", "rtruediv", "__rdiv__"),
    index=(2, 0),
    masked=False,
    role=("hidden", "loss", "is_weight", "ratio"),
    fix=(
        "clamp_denominator",
        "drop_invalid_sample",
        "fix_upstream",
        "avoid_singular_op",
        "validate_config",
        "mask_before_op",
        "representable_eps",
        "where_on_detached",
    ),
    variable=("inv_gap", "cof_r"),
    line=("inv_gap = 1 / (t - tt)",),
)


class VelocityNet(nn.Module):
    def __init__(self, dim, hidden=32):
        super().__init__()
        self.inp = nn.Linear(dim + 2, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x_t, t, tt):
        h = F.silu(self.inp(torch.cat([x_t, t, tt], dim=-1)))
        return self.out(F.silu(self.mid(h)))


@torch.no_grad()
def get_rcgm_target(model, F_th_t, target, x_t, t, tt):
    t_m = torch.maximum(t - 0.01, tt)
    x_m = x_t - target * 0.01
    Ft_tar = model(x_m, t_m, tt)
    mask = t < (tt + 0.01)
    inv_gap = 1 / (t - tt)
    cof_l = torch.where(mask, torch.ones_like(t), 100 * (t - tt))
    cof_r = torch.where(mask, inv_gap, torch.full_like(t, 100.0))
    Ft_tar = (F_th_t * cof_l - Ft_tar * cof_r) - target
    return F_th_t.detach() - Ft_tar.clamp(min=-1.0, max=1.0)


def build():
    torch.manual_seed(15)
    model = VelocityNet(dim=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(5, 6)
    z = torch.randn(5, 6)
    t = torch.tensor([[0.91], [0.44], [0.25], [0.63], [0.78]])
    tt = torch.tensor([[0.30], [0.12], [0.25], [0.01], [0.77]])
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, z=z, t=t, tt=tt)


def run(s=None):
    s = s or build()
    x_t = (1 - s.t) * s.x + s.t * s.z
    velocity = s.z - s.x
    F_th_t = s.model(x_t, s.t, s.tt)
    target = get_rcgm_target(s.model, F_th_t, velocity, x_t, s.t, s.tt)
    loss = F.mse_loss(F_th_t, target)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

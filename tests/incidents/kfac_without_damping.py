"""K-FAC with damping=0 and no running average: a sensor that is switched off makes a zero eigenvalue of the input covariance, and the
natural gradient divides by it. Loss and gradients are finite until the optimizer rewrites them.
Style of alecwangcq/KFAC-Pytorch, optimizers/kfac.py, KFACOptimizer (_update_inv, _get_natural_grad, _kl_clip_and_update_grad).

Checked by hand: damping=1e-3 heals (and is the default). Clipping the gradient norm before step() does not: the gradients were fine.
The numerator in that column is rounding noise of eigh, so the quotient is inf there (0/0 where the noise is exactly 0).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer", "grad"),
    fix=("validate_config", "clamp_denominator", "representable_eps"),
    variable=("v2",),
    line=("v2 = v1 / (self.d_g[m].unsqueeze(1) * self.d_a[m].unsqueeze(0) + damping)",),
)


class KFACOptimizer(torch.optim.Optimizer):
    def __init__(self, model, lr=0.01, stat_decay=0.95, damping=0.001, kl_clip=0.001):
        super().__init__(model.parameters(), dict(lr=lr, damping=damping))
        self.stat_decay, self.kl_clip, self.steps = stat_decay, kl_clip, 0
        self.m_aa, self.m_gg = {}, {}
        self.Q_a, self.Q_g, self.d_a, self.d_g = {}, {}, {}, {}
        self.modules = [m for m in model.modules() if isinstance(m, nn.Linear)]
        for m in self.modules:
            m.register_forward_pre_hook(self._save_input)
            m.register_forward_hook(self._watch_grad_output)

    def _running(self, stats, m, new):
        old = stats.setdefault(m, torch.eye(new.size(0)))
        stats[m] = self.stat_decay * old + (1 - self.stat_decay) * new

    def _save_input(self, m, args):
        a = args[0].detach()
        self._running(self.m_aa, m, a.t() @ (a / a.size(0)))

    def _watch_grad_output(self, m, args, output):
        output.register_hook(lambda grad: self._save_grad_output(m, grad))

    def _save_grad_output(self, m, g):
        self._running(self.m_gg, m, g.t() @ (g * g.size(0)))

    def _update_inv(self, m):
        eps = 1e-10
        self.d_a[m], self.Q_a[m] = torch.linalg.eigh(self.m_aa[m])
        self.d_g[m], self.Q_g[m] = torch.linalg.eigh(self.m_gg[m])
        self.d_a[m].mul_((self.d_a[m] > eps).float())
        self.d_g[m].mul_((self.d_g[m] > eps).float())

    def _get_natural_grad(self, m, p_grad_mat, damping):
        v1 = self.Q_g[m].t() @ p_grad_mat @ self.Q_a[m]
        v2 = v1 / (self.d_g[m].unsqueeze(1) * self.d_a[m].unsqueeze(0) + damping)
        return self.Q_g[m] @ v2 @ self.Q_a[m].t()

    @torch.no_grad()
    def step(self):
        lr, damping = self.param_groups[0]["lr"], self.param_groups[0]["damping"]
        updates, vg_sum = {}, 0.0
        for m in self.modules:
            self._update_inv(m)
            updates[m] = self._get_natural_grad(m, m.weight.grad, damping)
            vg_sum += (updates[m] * m.weight.grad * lr**2).sum().item()
        nu = min(1.0, math.sqrt(self.kl_clip / vg_sum))
        for m in self.modules:
            m.weight.grad.copy_(updates[m]).mul_(nu)
            m.weight.add_(m.weight.grad, alpha=-lr)
        self.steps += 1


def build():
    torch.manual_seed(1503)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))
    readings = torch.randn(32, 5)
    readings[:, 3] = 0.0  # switched off in this rig
    target = torch.randn(32, 3)
    optimizer = KFACOptimizer(model, stat_decay=0.0, damping=0.0)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=(readings, target))


def run(s=None):
    s = s or build()
    readings, target = s.batch
    loss = (s.model(readings) - target).square().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

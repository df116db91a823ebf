"""Pytorch-PCGrad on a shared policy with two tasks. The failure classifier of the solved task is saturated, its gradient is about 1e-24 and
conflicts with the other one: the projection divides by its squared norm, which is 0 in fp32, and what stands above it is 0 too.

https://github.com/WeiChengTseng/Pytorch-PCGrad/blob/master/pcgrad.py (PCGrad._project_conflicting)

Heals: an epsilon or a floor under the squared norm, or leaving out a task whose gradient is 0. Does not: 1e-46 as the epsilon (0 in fp32),
or clipping the merged gradient, which is NaN by then. Both losses and both gradients are finite.
"""

import copy
import random
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer", "backward"),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0,),
    masked=None,
    role=("grad", "optimizer"),
    fix=("clamp_denominator", "representable_eps", "guard_empty", "clamp_input", "skip_disabled_term", "avoid_singular_op"),
    variable=(None,),
    line=("g_i -= g_i_g_j * g_j / (g_j.norm() ** 2)",),
)


class PCGrad:
    def __init__(self, optimizer):
        self._optim = optimizer

    def zero_grad(self):
        return self._optim.zero_grad()

    def step(self):
        return self._optim.step()

    def params(self):
        return [p for group in self._optim.param_groups for p in group["params"]]

    def pc_backward(self, objectives):
        grads = self._pack_grad(objectives)
        pc_grad = self._project_conflicting(grads)
        self._set_grad(pc_grad)

    def _pack_grad(self, objectives):
        grads = []
        for obj in objectives:
            self._optim.zero_grad()
            obj.backward(retain_graph=True)
            grads.append(torch.cat([p.grad.flatten() for p in self.params()]))
        return grads

    def _project_conflicting(self, grads):
        pc_grad = copy.deepcopy(grads)
        for g_i in pc_grad:
            random.shuffle(grads)
            for g_j in grads:
                g_i_g_j = torch.dot(g_i, g_j)
                if g_i_g_j < 0:
                    g_i -= g_i_g_j * g_j / (g_j.norm() ** 2)
        return torch.stack(pc_grad).mean(dim=0)

    def _set_grad(self, grads):
        idx = 0
        for p in self.params():
            p.grad = grads[idx : idx + p.numel()].view_as(p).clone()
            idx += p.numel()


class SharedTrunk(nn.Module):
    def __init__(self, obs_dim=6, hidden=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh())
        self.head = nn.Linear(hidden, 1)

    def forward(self, obs):
        return self.head(self.trunk(obs)).squeeze(-1)


def build():
    torch.manual_seed(2207)
    random.seed(2207)
    model = SharedTrunk()
    reach_obs, door_obs = torch.randn(16, 6), torch.randn(16, 6)
    targets = torch.randn(16) + 3.0
    optimizer = PCGrad(torch.optim.Adam(model.parameters(), lr=3e-4))
    return SimpleNamespace(model=model, optimizer=optimizer, reach_obs=reach_obs, door_obs=door_obs, targets=targets)


def run(s=None):
    s = s or build()
    value_loss = F.mse_loss(s.model(s.door_obs), s.targets)
    failure_logits = s.model(s.reach_obs) - 55.0  # the solved task: no episode fails, and the classifier is very sure of it
    failure_loss = F.binary_cross_entropy_with_logits(failure_logits, torch.zeros(16))
    s.optimizer.zero_grad()
    s.optimizer.pc_backward([value_loss, failure_loss])
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return value_loss + failure_loss


if __name__ == "__main__":
    run()

"""OLMo-core style skip-step optimizer - the spread of the losses so far is NaN while there are fewer than two of them.

std of no and of one loss is NaN, the comparison with NaN is False, and the step factor is 0: the first two steps are left out and the run begins
at the third. The NaN never meets a weight. Healthy.
Source: https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py
"""

import warnings
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

warnings.filterwarnings("ignore", message=".*degrees of freedom.*")


class SkipStepLion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), rolling_interval_length=16, sigma_factor=6):
        super().__init__(params, dict(lr=lr, betas=betas))
        self.rolling_interval_length = rolling_interval_length
        self.sigma_factor = sigma_factor
        self._losses = []

    @property
    def latest_loss(self):
        return self._losses[-1]

    @latest_loss.setter
    def latest_loss(self, loss):
        self._losses.append(loss)
        while len(self._losses) > self.rolling_interval_length + 1:
            self._losses.pop(0)

    @torch.no_grad()
    def get_step_factor(self):
        before = torch.stack(self._losses)[:-1]
        std, mean = torch.std_mean(before)
        return ((self.latest_loss - mean) <= self.sigma_factor * std).float()

    @torch.no_grad()
    def step(self):
        step_factor = self.get_step_factor()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"].mul(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update * step_factor, alpha=-group["lr"])
                decay = step_factor * (1 - beta2)
                state["exp_avg"].lerp_(p.grad, decay)


def build():
    torch.manual_seed(20)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = SkipStepLion(model.parameters(), lr=1e-2)
    batches = torch.randint(0, 16, (6, 4, 9))
    return SimpleNamespace(model=model, optimizer=optimizer, batches=batches, skipped=[])


def run(s=None):
    s = s or build()
    for ids in s.batches:
        logits = s.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.latest_loss = loss.detach()
        s.skipped.append(1 - s.optimizer.get_step_factor())
        s.optimizer.step()
    return loss

"""IDBD / TIDBD (Sutton 1992) as a torch optimizer - a step size per weight, alpha = exp(beta), beta learned on line.

The rewards are raw (thousands) and two errors of one sign follow each other: the meta step adds more than a hundred to beta, exp of it is
inf, and the weights are inf although loss and gradients of both steps are finite. Formula of
https://github.com/vivekveeriah/IncrementalDeltaBarDelta and of the torch IDBD optimizers after it. Bounding beta (Sutton bounds its change
to 2 a step), a smaller meta rate or scaled errors heal; nan_to_num on the gradients does nothing.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(0, 0),
    masked=None,
    role=("optimizer",),
    fix=("clamp_exponent", "validate_config", "clamp_input", "skip_bad_step", "fix_upstream"),
    variable=("alpha",),
    line=('alpha = state["beta"].exp()',),
)


class IDBD(torch.optim.Optimizer):
    def __init__(self, params, meta_lr=0.01, init_lr=1e-6):
        super().__init__(params, dict(meta_lr=meta_lr, init_lr=init_lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["beta"] = torch.full_like(p, group["init_lr"]).log()
                    state["h"] = torch.zeros_like(p)
                g = p.grad
                state["beta"].sub_(group["meta_lr"] * g * state["h"])
                alpha = state["beta"].exp()
                p.sub_(alpha * g)
                decay = (1.0 - alpha * g.square()).clamp(min=0.0)
                state["h"] = state["h"] * decay - alpha * g


def build():
    torch.manual_seed(92)
    value = nn.Linear(5, 1, bias=False)
    with torch.no_grad():
        value.weight.mul_(0.1)
    sensors = torch.tensor([[40.0, 25.0, 31.0, 18.0, 27.0], [41.0, 26.0, 30.0, 19.0, 27.0], [39.0, 27.0, 31.0, 18.0, 26.0]])
    rewards = torch.tensor([2600.0, 2700.0, 2650.0])
    return SimpleNamespace(model=value, sensors=sensors, rewards=rewards, gamma=0.9, optimizer=IDBD(value.parameters()))


def run(s=None):
    s = s or build()
    for t in range(2):
        v = s.model(s.sensors[t]).squeeze(-1)
        with torch.no_grad():
            target = s.rewards[t] + s.gamma * s.model(s.sensors[t + 1]).squeeze(-1)
        loss = 0.5 * (target - v).pow(2)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

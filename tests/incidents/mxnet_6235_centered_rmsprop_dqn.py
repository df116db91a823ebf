"""mxnet #6235 (also FastNN #12) - centred RMSProp takes the root of E[g^2] - E[g]^2, and the difference comes out negative.

A DQN with Huber loss and unscaled features: the error stays beyond 1, so the gradient is the same in every step and its running variance
goes to 0. The difference of the two averages is rounding noise of about 1e-7 * g^2, far above eps, and in the end it is negative: the root
is NaN although loss and gradients are finite, and the update writes NaN into the weight.
Source: https://github.com/apache/mxnet/pull/6235, https://github.com/CanReader/FastNN/issues/12; the DQN of the Nature paper uses this rule.
Heals: clamping the variance at 0 before the root. Does not: adding eps once more outside the root.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(0, 2),
    masked=None,
    role=("optimizer",),
    fix=("clamp_input", "clamp_denominator"),
    variable=("avg",),
    line=('avg = (square_avg - grad_avg.pow(2) + group["eps"]).sqrt()',),
)


class CenteredRMSprop(torch.optim.Optimizer):
    """RMSProp as in Graves (2013): the gradient is divided by a running estimate of its standard deviation."""

    def __init__(self, params, lr=2.5e-4, alpha=0.9, eps=1e-6):
        super().__init__(params, dict(lr=lr, alpha=alpha, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["square_avg"] = torch.zeros_like(p)
                    state["grad_avg"] = torch.zeros_like(p)
                square_avg, grad_avg = state["square_avg"], state["grad_avg"]
                square_avg.mul_(group["alpha"]).addcmul_(p.grad, p.grad, value=1 - group["alpha"])
                grad_avg.mul_(group["alpha"]).add_(p.grad, alpha=1 - group["alpha"])
                avg = (square_avg - grad_avg.pow(2) + group["eps"]).sqrt()
                p.addcdiv_(p.grad, avg, value=-group["lr"])


def build():
    torch.manual_seed(2135)
    q_network = nn.Linear(4, 2, bias=False)
    features = torch.tensor([[0.0, 1.0, 223.0, 0.5]])  # the third is a raw altitude
    action = torch.tensor([[0]])
    target = torch.tensor([[9.0e5]])  # undiscounted score
    optimizer = CenteredRMSprop(q_network.parameters())
    return SimpleNamespace(model=q_network, optimizer=optimizer, features=features, action=action, target=target, updates=200)


def run(s=None):
    s = s or build()
    for _ in range(s.updates):
        q = s.model(s.features).gather(1, s.action)
        loss = F.smooth_l1_loss(q, s.target)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

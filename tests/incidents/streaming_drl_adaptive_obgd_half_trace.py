"""streaming-drl AdaptiveObGD - the trace is divided by sqrt(v_hat + 1e-8), kept in half precision on the robot.

v is (1 - beta2) * (delta * trace)^2: for a feature near 0 it is below the smallest half, and so is the epsilon. The element is divided by 0;
loss and gradients are finite, the sum of the scaled traces is inf, the step size lr / inf = 0, and 0 * inf writes NaN into the weight.
Heals: trace and second moment in float32, an epsilon that half can hold, a floor of the denominator; skipping the step saves the weights.
Does not: bounding the sum of the traces, clipping the gradient.
Source: https://github.com/mohmdelsayed/streaming-drl optim.py (AdaptiveObGD.step)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_denominator"),
    op=("div",),
    index=(0, 2),
    masked=None,
    role=("optimizer", "grad"),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator", "skip_bad_step", "avoid_singular_op"),
    variable=("scaled", None, 'state["scaled"]'),
    line=('scaled = e / (v_hat + group["eps"]).sqrt()',),
)


class AdaptiveObGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, gamma=0.99, lamda=0.8, kappa=2.0, beta2=0.999, eps=1e-8):
        super().__init__(params, dict(lr=lr, gamma=gamma, lamda=lamda, kappa=kappa, beta2=beta2, eps=eps))
        self.counter = 0

    @torch.no_grad()
    def step(self, delta, reset=False):
        z_sum = 0.0
        self.counter += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["eligibility_trace"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                e, v = state["eligibility_trace"], state["v"]
                e.mul_(group["gamma"] * group["lamda"]).add_(p.grad)
                v.mul_(group["beta2"]).addcmul_(delta * e, delta * e, value=1.0 - group["beta2"])
                v_hat = v / (1.0 - group["beta2"] ** self.counter)
                scaled = e / (v_hat + group["eps"]).sqrt()
                z_sum += scaled.abs().sum().item()
                state["scaled"] = scaled
        delta_bar = max(abs(delta), 1.0)
        dot_product = delta_bar * z_sum * group["lr"] * group["kappa"]
        step_size = group["lr"] / dot_product if dot_product > 1 else group["lr"]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                p.add_(delta * state["scaled"], alpha=-step_size)
                if reset:
                    state["eligibility_trace"].zero_()


class Critic(nn.Module):
    def __init__(self, n_obs=6):
        super().__init__()
        self.linear_v = nn.Linear(n_obs, 1)

    def forward(self, obs):
        return self.linear_v(obs)


def build():
    torch.manual_seed(11)
    critic = Critic().half()
    transition = dict(
        obs=torch.tensor([0.8, -1.2, 0.003, 0.6, -0.4, 1.1]).half(),
        reward=1.0,
        done=False,
        next_obs=torch.tensor([0.7, -1.0, 0.004, 0.5, -0.5, 1.2]).half(),
    )
    return SimpleNamespace(model=critic, transition=transition, optimizer=AdaptiveObGD(critic.parameters(), lr=1.0))


def run(s=None, gamma=0.99):
    s = s or build()
    t = s.transition
    v_s = s.model(t["obs"])
    with torch.no_grad():
        td_target = t["reward"] + gamma * s.model(t["next_obs"]) * (0.0 if t["done"] else 1.0)
        delta = (td_target - v_s).item()
    loss = -v_s.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step(delta, reset=t["done"])
    return loss

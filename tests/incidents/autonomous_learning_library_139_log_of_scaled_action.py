"""autonomous-learning-library #139 (the same in philtabor/Actor-Critic-Methods-Paper-To-Code #7): the soft policy of SAC
squashes its raw action with tanh, scales it to the action space (Pendulum: [-2, 2]) and then forms the change of variables
log(1 - a^2 + 1e-6) with the SCALED action. As soon as |a| > 1 the argument is negative and the logarithm is NaN. It enters the
critic's target as the entropy term, so the critic's loss and gradients are NaN.

    https://github.com/cpnota/autonomous-learning-library/issues/139
    https://github.com/philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7

Heals: use tanh(raw) in the correction (#140), the softplus form of it, or clamping the argument above 0.
Does not heal: a bigger epsilon (1e-2), nan_to_num on the loss (its gradient multiplies 0 by NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2, 0),
    masked=None,
    role=("log_probs", "entropy"),
    fix=("fix_upstream", "stable_function", "clamp_input"),
    variable=("correction",),
    line=("correction = torch.log(1 - action.pow(2) + self.epsilon)",),
)


class SoftDeterministicPolicyNetwork(nn.Module):
    def __init__(self, state_dim, action_dim, action_low, action_high, hidden=16):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(state_dim, hidden), nn.ReLU(), nn.Linear(hidden, 2 * action_dim))
        self.action_dim = action_dim
        self.register_buffer("tanh_scale", (action_high - action_low) / 2)
        self.register_buffer("tanh_mean", (action_high + action_low) / 2)
        self.epsilon = 1e-6

    def forward(self, state):
        outputs = self.model(state)
        means, logvars = outputs[:, : self.action_dim], outputs[:, self.action_dim :]
        normal = Normal(means, logvars.mul(0.5).exp())
        return self._sample(normal)

    def _squash(self, raw):
        return torch.tanh(raw) * self.tanh_scale + self.tanh_mean

    def _sample(self, normal):
        raw = normal.rsample()
        action = self._squash(raw)
        log_prob = normal.log_prob(raw)
        correction = torch.log(1 - action.pow(2) + self.epsilon)
        return action, (log_prob - correction).sum(1)


def q_function(state_dim, action_dim, hidden=16):
    return nn.Sequential(nn.Linear(state_dim + action_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def build():
    torch.manual_seed(3)
    policy = SoftDeterministicPolicyNetwork(3, 2, torch.tensor([-2.0, -0.5]), torch.tensor([2.0, 0.5]))
    q = q_function(3, 2)
    model = nn.ModuleDict({"policy": policy, "q": q})
    batch = {
        "states": torch.randn(6, 3),
        "actions": torch.rand(6, 2) - 0.5,
        "rewards": torch.randn(6),
        "next_states": torch.randn(6, 3),
        "not_done": torch.ones(6),
    }
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-4)
    return SimpleNamespace(model=model, batch=batch, optimizer=optimizer, temperature=0.2, discount=0.99)


def run(s=None):
    s = s or build()
    torch.manual_seed(12)
    policy, q, b = s.model["policy"], s.model["q"], s.batch
    with torch.no_grad():
        next_actions, next_log_probs = policy(b["next_states"])
        next_values = q(torch.cat([b["next_states"], next_actions], dim=1)).squeeze(1) - s.temperature * next_log_probs
        targets = b["rewards"] + s.discount * b["not_done"] * next_values
    q_values = q(torch.cat([b["states"], b["actions"]], dim=1)).squeeze(1)
    loss = nn.functional.mse_loss(q_values, targets)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

"""leela-chess #283: the search policy N^(1/tau) is formed from raw visit counts. With 800 visits and tau = 0.05 the power is
800^20 = 1e58, beyond single precision: inf / inf is NaN in the policy target, and the cross entropy of the policy head is NaN.
The merged change divides the counts by a reference count before the power.

    https://github.com/glinscott/leela-chess/pull/283
    https://github.com/suragnair/alpha-zero-general/issues/49

Heals: softmax(log N / tau) or counts divided by their maximum first, a floor for tau, double precision for the power.
Does not heal: an epsilon in the sum. nan_to_num on the target only hides it: the two best moves are then taught as 0.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow", "exp_overflow"),
    op=("pow",),
    index=(2, 1),
    masked=None,
    role=("hidden", "logits", "log_probs", "is_weight"),
    fix=("stable_function", "validate_config", "clamp_denominator", "clamp_exponent", "upcast_fp32"),
    variable=("powered",),
    line=("powered = visits ** (1.0 / temperature)",),
)


class PolicyValueNet(nn.Module):
    def __init__(self, planes=12, moves=5, hidden=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(planes, hidden), nn.ReLU())
        self.policy = nn.Linear(hidden, moves)
        self.value = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h), torch.tanh(self.value(h)).squeeze(-1)


def search_probabilities(visits, temperature):
    powered = visits ** (1.0 / temperature)
    return powered / powered.sum(-1, keepdim=True)


def temperature_of(ply, start=1.0, cutoff=30, final=0.05):
    return start if ply < cutoff else final


def build():
    torch.manual_seed(21)
    model = PolicyValueNet()
    games = SimpleNamespace(
        planes=torch.randn(4, 12),
        visits=torch.tensor(
            [
                [20.0, 31.0, 12.0, 5.0, 0.0],
                [44.0, 2.0, 17.0, 1.0, 9.0],
                [3.0, 412.0, 371.0, 11.0, 3.0],
                [61.0, 0.0, 30.0, 8.0, 2.0],
            ]
        ),
        outcome=torch.tensor([1.0, -1.0, 1.0, 0.0]),
        ply=41,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    return SimpleNamespace(model=model, games=games, optimizer=optimizer)


def run(s=None):
    s = s or build()
    target = search_probabilities(s.games.visits, temperature_of(s.games.ply))
    logits, value = s.model(s.games.planes)
    policy_loss = -(target * F.log_softmax(logits, dim=-1)).sum(-1).mean()
    value_loss = F.mse_loss(value, s.games.outcome)
    loss = policy_loss + value_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

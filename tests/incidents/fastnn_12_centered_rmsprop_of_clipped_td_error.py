"""CanReader/FastNN #12 (torch's own formula, pytorch #810): centered RMSprop takes sqrt(E[g^2] - E[g]^2) and adds eps after it. Nature-DQN
sums clipped TD errors: far from the target every transition has the gradient 1, so the gradient of a weight is the same number step after step,
both averages meet, and rounding makes their difference negative. Loss and gradients are finite; the update is NaN.

https://github.com/CanReader/FastNN/issues/12 https://github.com/pytorch/pytorch/pull/810
The plain second moment (centered=False), a clamp of the difference at 0, or rewards of unit size in reach of the clip heal it. A larger eps or a
smaller learning rate does not: eps comes after the root.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("sqrt_negative",),
    op=("sqrt", "sqrt_", "_foreach_sqrt_", "_foreach_sqrt", "rmsprop", "RMSprop", "step"),
    index=(2, 2),
    masked=None,
    role=("optimizer", "weights"),
    fix=("avoid_singular_op", "clamp_denominator", "clamp_input", "stable_function", "validate_config"),
    variable=(None, "weight", "q_head.weight", "model.q_head.weight"),
    line=("s.optimizer.step()", "update(s)", None),
)


class DQN(nn.Module):
    def __init__(self, features=4, actions=3):
        super().__init__()
        self.q_head = nn.Linear(features, actions)

    def forward(self, features):
        return self.q_head(features)


def update(s):
    q_values = s.model(s.batch.features).gather(1, s.batch.actions.unsqueeze(1)).squeeze(1)
    loss = F.smooth_l1_loss(q_values, s.batch.targets, reduction="sum")  # the TD error, clipped to [-1, 1]
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


def build():
    torch.manual_seed(3)
    q_net = DQN()
    batch = SimpleNamespace(
        features=(torch.rand(12, 4) * 8).round() / 8,
        actions=torch.randint(0, 3, (12,)),
        targets=torch.full((12,), 4000.0),  # raw game score: rewards are not clipped
    )
    optimizer = torch.optim.RMSprop(q_net.parameters(), lr=2.5e-4, alpha=0.95, eps=0.01, centered=True)
    s = SimpleNamespace(model=q_net, batch=batch, optimizer=optimizer)
    for _ in range(266):  # overfit one batch first, the usual smoke test
        update(s)
    return s


def run(s=None):
    s = s or build()
    loss = update(s)
    return loss


if __name__ == "__main__":
    print(run())

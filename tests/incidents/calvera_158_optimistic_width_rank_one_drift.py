"""calvera #158 - a linear bandit keeps the inverse of its design matrix by rank-one updates in float32.

The contexts are raw (norms of about 1e5), so a Sherman-Morrison update subtracts almost all that is there and what is left is rounding; the
matrix is no longer positive definite and the squared width of some contexts is negative. Its square root is NaN, and the optimistic
regression target with it. Source: https://github.com/neural-bandits/calvera/issues/158 ("often invalid precision_matrix").
Clamping the squared width at 0, or solving with the accumulated matrix, heals; symmetrising the inverse does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(1,),
    masked=None,
    role=("rewards", "advantages", "hidden"),
    fix=("clamp_input", "stable_function", "fix_upstream", "mask_before_op"),
    variable=("width",),
    line=("width = squared_width.sqrt()",),
)


class LinearUCB:
    def __init__(self, n_features, lambda_=1.0, alpha=0.5):
        self.alpha = alpha
        self.lambda_ = lambda_
        self.inverse = torch.eye(n_features) / lambda_

    def update(self, context):
        u = self.inverse @ context
        self.inverse = self.inverse - torch.outer(u, u) / (1.0 + context @ u)

    def bonus(self, contexts):
        squared_width = torch.einsum("bi,ij,bj->b", contexts, self.inverse, contexts)
        width = squared_width.sqrt()
        return self.alpha * width


class RewardHead(nn.Module):
    def __init__(self, n_features=6):
        super().__init__()
        self.norm = nn.LayerNorm(n_features)
        self.net = nn.Sequential(nn.Linear(n_features, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, contexts):
        return self.net(self.norm(contexts)).squeeze(-1)


def build():
    torch.manual_seed(277)
    base = torch.tensor([86400.0, 52000.0, 900.0, 60.0, 3.0, 1.0])  # second of the day, balance, tenure in days, age, ...
    history = base * (1.0 + 0.02 * torch.randn(4, 6))
    contexts = base * (1.0 + 0.02 * torch.randn(8, 6))
    rewards = torch.rand(8)
    head = RewardHead()
    return SimpleNamespace(
        bandit=LinearUCB(6),
        head=head,
        model=head,
        history=history,
        contexts=contexts,
        rewards=rewards,
        optimizer=torch.optim.Adam(head.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    for context in s.history:
        s.bandit.update(context)
    optimistic_rewards = s.rewards + s.bandit.bonus(s.contexts)
    prediction = s.head(s.contexts)
    loss = (prediction - optimistic_rewards).pow(2).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

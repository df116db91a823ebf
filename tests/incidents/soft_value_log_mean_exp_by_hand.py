"""The soft value α · log mean exp(Q / α), written out: with a small temperature one Q of 20 is an exponent of 200, and exp overflows before
the logarithm could take it back.

torch.logsumexp − log n heals and changes no value; clamping the exponents changes the value of the state that it is about.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 3),
    masked=False,
    role=("values", "logits", "loss"),
    fix=("stable_function",),
    variable=("raised",),
    line=("raised = torch.exp(q / alpha)",),
)


def soft_value(q, alpha):
    raised = torch.exp(q / alpha)
    return alpha * raised.mean(dim=-1).log()


def build():
    torch.manual_seed(21)
    critic = nn.Linear(3, 5)
    states, rewards = 0.5 * torch.randn(4, 3), torch.randn(4)
    with torch.no_grad():
        critic.weight.mul_(0.5)
        critic.weight[3, 0] = 4.0
    states[:, 0].clamp_(-1.0, 1.0)
    states[1, 0] = 5.0
    return SimpleNamespace(model=critic, states=states, rewards=rewards, optimizer=torch.optim.Adam(critic.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    value = soft_value(s.model(s.states), alpha=0.1)
    loss = (value - s.rewards).square().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

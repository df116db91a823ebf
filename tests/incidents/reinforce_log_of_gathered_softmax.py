"""REINFORCE with probabilities: the softmax is taken, the action's entry gathered, and then its logarithm. One action was so unlikely that its
probability is 0 in float32.

log_softmax before the gather heals; an epsilon within the logarithm heals, and gives that action no gradient.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(3,),
    masked=False,
    role=("log_probs",),
    fix=("stable_function",),
    variable=("log_prob",),
    line=("log_prob = torch.log(chosen.squeeze(1))",),
)


def build():
    torch.manual_seed(8)
    policy = nn.Linear(3, 4)
    with torch.no_grad():
        policy.weight[0] = torch.tensor([40.0, 0.0, 0.0])
    states = 0.5 * torch.randn(6, 3)
    states[3, 0] = 4.0
    actions = torch.tensor([1, 0, 2, 2, 3, 1])  # the fourth one was sampled by an older policy
    return SimpleNamespace(
        model=policy, states=states, actions=actions, returns=torch.randn(6), optimizer=torch.optim.SGD(policy.parameters(), lr=0.01)
    )


def run(s=None):
    s = s or build()
    probs = torch.softmax(s.model(s.states), dim=-1)
    chosen = probs.gather(1, s.actions[:, None])
    log_prob = torch.log(chosen.squeeze(1))
    loss = -(log_prob * s.returns).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""ml-agents #4664 - Match3: the masked action branch renormalises probabilities whose sum underflowed.

The branch takes a softmax over all actions, multiplies it with the mask of allowed actions and divides by the sum of what is left. In one state
the policy is so sure of a move that has just become illegal that every allowed probability is 0 in float32: 0 / 0, and the log-probabilities and
the entropy of that agent are NaN.
Source: https://github.com/Unity-Technologies/ml-agents/pull/4664 (ml-agents/mlagents/trainers/torch/distributions.py)

Heals: mask the logits before the softmax (what the later code does, -1e8 on the illegal ones), or an epsilon in the denominator (the PR).
Does not: the epsilon inside the logarithm (it is there), nor nan_to_num on the log-probabilities: the loss is finite then, the gradient is not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(4, 0),
    masked=False,
    role=("log_probs", "logits"),
    fix=("mask_before_op", "clamp_denominator", "stable_function", "finite_mask_fill", "clamp_input"),
    variable=("normalized_probs",),
    line=("normalized_probs = raw_probs / torch.sum(raw_probs, dim=-1, keepdim=True)",),
)

EPSILON = 1e-7


class CategoricalDistInstance:
    def __init__(self, log_probs):
        self.all_log_prob = log_probs
        self.probs = log_probs.exp()

    def log_prob(self, value):
        return self.all_log_prob.gather(-1, value.unsqueeze(-1)).squeeze(-1)

    def entropy(self):
        return -torch.sum(self.probs * self.all_log_prob, dim=-1)


class MultiCategoricalDistribution(nn.Module):
    def __init__(self, hidden_size, act_size):
        super().__init__()
        self.branch = nn.Linear(hidden_size, act_size)

    def mask_branch(self, logits, mask):
        raw_probs = torch.softmax(logits, dim=-1) * mask
        normalized_probs = raw_probs / torch.sum(raw_probs, dim=-1, keepdim=True)
        return torch.log(normalized_probs + EPSILON)

    def forward(self, inputs, mask):
        return CategoricalDistInstance(self.mask_branch(self.branch(inputs), mask))


class Actor(nn.Module):
    def __init__(self, obs_size=10, hidden_size=32, act_size=7):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_size, hidden_size), nn.SiLU())
        self.distribution = MultiCategoricalDistribution(hidden_size, act_size)
        self.value = nn.Linear(hidden_size, 1)

    def forward(self, obs, mask):
        h = self.body(obs)
        return self.distribution(h, mask), self.value(h).squeeze(-1)


def build():
    torch.manual_seed(4664)
    model = Actor()
    obs = torch.randn(6, 10)
    action_mask = torch.ones(6, 7)
    action_mask[1, 3] = 0.0
    with torch.no_grad():
        h = model.body(obs[4:5])
        model.distribution.branch.weight[5] += 160.0 * h[0] / h.pow(2).sum()  # long training has made move 5 certain here
        action_mask[4, 5] = 0.0  # and the board does not allow it now
    actions = torch.tensor([0, 2, 1, 6, 0, 3])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        obs=obs,
        action_mask=action_mask,
        actions=actions,
        advantages=torch.randn(6),
        returns=torch.randn(6),
        old_log_probs=torch.full((6,), -1.9),
    )


def run(s=None):
    s = s or build()
    dist, value = s.model(s.obs, s.action_mask)
    log_probs = dist.log_prob(s.actions)
    ratio = torch.exp((log_probs - s.old_log_probs).clamp(max=10.0))
    policy_loss = -torch.min(ratio * s.advantages, ratio.clamp(0.8, 1.2) * s.advantages).mean()
    value_loss = (value - s.returns).pow(2).mean()
    loss = policy_loss + 0.5 * value_loss - 0.005 * dist.entropy().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

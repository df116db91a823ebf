"""Healthy. An upper-confidence bandit with a neural reward model (as AgileRL #203, NeuralUCB): the bonus of an arm that was never pulled is
sqrt(log t / 0) = inf. The infinite score makes argmax take that arm, nothing else: the loss reads the predicted reward of the chosen arm, not the
score. The mean regret of arms without a pull is NaN and only goes to the log.

https://github.com/AgileRL/AgileRL/pull/203
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class RewardModel(nn.Module):
    def __init__(self, context_dim=4, arms=5, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(context_dim, hidden), nn.ReLU(), nn.Linear(hidden, arms))

    def forward(self, context):
        return self.net(context)


def build():
    torch.manual_seed(203)
    model = RewardModel()
    return SimpleNamespace(
        model=model,
        counts=torch.tensor([9.0, 4.0, 0.0, 2.0, 0.0]),
        reward_sums=torch.tensor([3.0, 2.0, 0.0, 1.0, 0.0]),
        contexts=torch.randn(6, 4),
        payoff=torch.rand(6, 5),
        logs={},
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
    )


def run(s=None):
    s = s or build()
    total = 0.0
    for context, payoff in zip(s.contexts, s.payoff):
        with torch.no_grad():
            bonus = torch.sqrt(2.0 * torch.log(s.counts.sum()) / s.counts)
            scores = s.model(context) + bonus
            arm = int(scores.argmax())
            s.logs["empirical_mean"] = s.reward_sums / s.counts
            s.logs["regret"] = (payoff.max() - s.logs["empirical_mean"]).mean().item()
        reward = payoff[arm]
        loss = (s.model(context)[arm] - reward).pow(2)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        s.counts[arm] += 1
        s.reward_sums[arm] += reward
        total = total + loss.detach()
    return total


if __name__ == "__main__":
    print(run())

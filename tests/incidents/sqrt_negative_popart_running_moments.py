"""PopArt keeps E[x] and E[x^2] per task in float32; with a large mean and a tiny spread the difference is negative and
its root is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(2,),
    masked=None,
    role=("rewards", "advantages", "loss"),
    fix=("clamp_input", "avoid_singular_op", "clamp_denominator", "stable_function"),
    variable=("sigma",),
    line=("sigma = torch.sqrt(self.second - self.first**2)",),
)


class TaskMoments:
    def __init__(self, n_tasks, decay=0.5):
        self.first = torch.zeros(n_tasks)
        self.second = torch.ones(n_tasks)
        self.decay = decay

    def update(self, task, returns):
        self.first[task] += self.decay * (returns.mean() - self.first[task])
        self.second[task] += self.decay * (returns.square().mean() - self.second[task])

    def scale(self):
        sigma = torch.sqrt(self.second - self.first**2)
        return self.first, sigma + 1e-4


class Critic(nn.Module):
    def __init__(self, width=7, n_tasks=4):
        super().__init__()
        self.torso = nn.Linear(width, 16)
        self.heads = nn.Linear(16, n_tasks)

    def forward(self, obs, task):
        return self.heads(torch.relu(self.torso(obs))).gather(1, task[:, None]).squeeze(1)


def build():
    torch.manual_seed(104)
    critic = Critic()
    moments = TaskMoments(4)
    task = torch.tensor([0, 2, 1, 2, 3, 2, 0, 1])
    returns = torch.tensor([0.3, 1234.5, -1.0, 1234.5, 2.2, 1234.5, 0.9, -0.2])
    for _ in range(60):  # warm-up: task 2 has paid the same return for a long time
        for k in range(4):
            jitter = torch.zeros(6) if k == 2 else torch.randn(6)
            moments.update(k, returns[task == k].mean() + jitter)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    return SimpleNamespace(model=critic, moments=moments, optimizer=optimizer, batch=(torch.randn(8, 7), task, returns))


def run(s=None):
    s = s or build()
    obs, task, returns = s.batch
    mu, sigma = s.moments.scale()
    target = (returns - mu[task]) / sigma[task]
    value_loss = nn.functional.huber_loss(s.model(obs, task), target)
    value_loss.backward()
    s.optimizer.step()
    return value_loss

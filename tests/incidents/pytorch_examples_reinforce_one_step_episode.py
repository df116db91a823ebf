"""pytorch/examples, reinforce.py on another environment - an episode of one step.

finish_episode standardises the returns of one episode. The pole starts outside its limits, the episode is over after the first step, and the unbiased std of
one return is NaN; eps does not help. (Source: pytorch/examples, reinforcement_learning/reinforce.py, finish_episode.) Heals: standardising only if
there are two returns; skipping the episode; skipping a step whose loss is not finite. Does not: a larger eps, std().clamp(min=eps).
"""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,
    role=("advantages", "rewards"),
    fix=("guard_small_group", "drop_invalid_sample", "skip_bad_step", "where_on_detached"),
    variable=(None,),
    line=("returns = (returns - returns.mean()) / (returns.std() + eps)",),
)

gamma = 0.99
eps = np.finfo(np.float32).eps.item()


class Pole:
    def __init__(self, starts):
        self.starts = list(starts)

    def reset(self):
        self.x = torch.tensor([0.0, 0.0, self.starts.pop(0), 0.0])
        return self.x.clone()

    def step(self, action):
        self.x[3] += 0.1 * self.x[2] + (0.02 if action == 1 else -0.02)
        self.x[2] += self.x[3]
        return self.x.clone(), 1.0, bool(self.x[2].abs() > 0.3)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 32)
        self.affine2 = nn.Linear(32, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


def select_action(policy, state):
    m = Categorical(policy(state.unsqueeze(0)))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(policy, optimizer):
    R = 0
    policy_loss = []
    returns = []
    for r in policy.rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]
    return policy_loss


def build():
    torch.manual_seed(543)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    return SimpleNamespace(model=policy, optimizer=optimizer, env=Pole([0.02, 0.33]))


def run(s=None):
    s = s or build()
    while s.env.starts:
        state = s.env.reset()
        for t in range(1, 50):
            state, reward, done = s.env.step(select_action(s.model, state))
            s.model.rewards.append(reward)
            if done:
                break
        loss = finish_episode(s.model, s.optimizer)
    return loss


if __name__ == "__main__":
    print(run())

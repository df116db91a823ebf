"""lunar_lander_per #2 - prioritised replay: a transition with TD error 0 has priority 0, and 0 ** -beta is inf.

The importance weights (N * p) ** -beta are refreshed after each sweep with the new priorities. The absorbing state is all zeros, the
network has no biases and the reward is 0, so its TD error is exactly 0 and so is its priority. Its weight is inf; divided by the largest
weight it is inf / inf = NaN and all the others are 0. The next update has a NaN loss.
Source: https://github.com/Guillaume-Cr/lunar_lander_per/issues/2 (replay_buffer.py, `update_priorities`).
Heals: the usual small constant on the priorities, or a floor under the probability. Does not: a small constant in the division by the
largest weight.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("pow",),
    index=(3,),
    masked=False,
    role=("is_weight",),
    fix=("clamp_input", "clamp_denominator", "representable_eps"),
    variable=("weights",),
    line=("weights = (len(self.priorities) * probabilities) ** (-self.beta)",),
)


class ReplayBuffer:
    def __init__(self, states, actions, rewards, next_states, dones, alpha=0.6, beta=0.4):
        self.memory = (states, actions, rewards, next_states, dones)
        self.alpha, self.beta = alpha, beta
        self.priorities = torch.ones(len(rewards), dtype=torch.float64)
        self.weights = torch.ones(len(rewards), dtype=torch.float64)

    def sample(self):
        return self.memory, self.weights

    @torch.no_grad()
    def update_priorities(self, td_errors):
        self.priorities = td_errors.double().abs() ** self.alpha
        probabilities = self.priorities / self.priorities.sum()
        weights = (len(self.priorities) * probabilities) ** (-self.beta)
        self.weights = weights / weights.max()


def build():
    torch.manual_seed(2102)
    qnetwork_local = nn.Sequential(nn.Linear(4, 16, bias=False), nn.ReLU(), nn.Linear(16, 3, bias=False))
    qnetwork_target = nn.Sequential(nn.Linear(4, 16, bias=False), nn.ReLU(), nn.Linear(16, 3, bias=False))
    qnetwork_target.load_state_dict(qnetwork_local.state_dict())
    states = torch.randn(6, 4)
    states[3] = 0.0  # the lander rests on the pad
    actions = torch.randint(0, 3, (6, 1))
    rewards = torch.randn(6)
    rewards[3] = 0.0
    next_states = torch.randn(6, 4)
    dones = torch.zeros(6)
    dones[3] = 1.0
    memory = ReplayBuffer(states, actions, rewards, next_states, dones)
    optimizer = torch.optim.Adam(qnetwork_local.parameters(), lr=5e-4)
    return SimpleNamespace(model=qnetwork_local, target=qnetwork_target, memory=memory, optimizer=optimizer, gamma=0.99)


def learn(s):
    (states, actions, rewards, next_states, dones), is_weights = s.memory.sample()
    with torch.no_grad():
        q_next = s.target(next_states).max(1).values
        q_targets = rewards + s.gamma * q_next * (1 - dones)
    q_expected = s.model(states).gather(1, actions).squeeze(1)
    td_errors = q_targets - q_expected
    loss = (is_weights.float() * td_errors**2).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    s.memory.update_priorities(td_errors.detach())
    return loss


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = learn(s)
    return loss

"""The GAE buffer comes from torch.empty and the backward scan starts one step too early, so the last column is never written."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "input"),
    cause=("uninitialized",),
    op=("empty",),
    index=(0, 5),
    masked=False,
    role=("advantages",),
    fix=("initialise_memory",),
    variable=("advantages",),
    line=("advantages = torch.empty(rewards.shape)",),
)


class ActorCritic(nn.Module):
    def __init__(self, obs=5, actions=4, width=10):
        super().__init__()
        self.body = nn.Linear(obs, width)
        self.pi = nn.Linear(width, actions)
        self.v = nn.Linear(width, 1)

    def forward(self, obs):
        h = torch.relu(self.body(obs))
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def gae(rewards, values, gamma=0.99, lam=0.95):
    horizon = rewards.shape[1]
    advantages = torch.empty(rewards.shape)
    running = torch.zeros(rewards.shape[0])
    for t in range(horizon - 2, -1, -1):
        delta = rewards[:, t] + gamma * values[:, t + 1] - values[:, t]
        running = delta + gamma * lam * running
        advantages[:, t] = running
    return advantages


def build():
    torch.manual_seed(313)
    torch.use_deterministic_algorithms(True)  # reproducible runs
    net = ActorCritic()
    obs = torch.randn(4, 6, 5)
    batch = {"obs": obs, "actions": torch.randint(0, 4, (4, 6)), "rewards": torch.rand(4, 6)}
    return SimpleNamespace(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=3e-4), batch=batch)


def run(s=None):
    s = s or build()
    logits, values = s.model(s.batch["obs"])
    advantages = gae(s.batch["rewards"], values)
    logp = logits.log_softmax(-1).gather(-1, s.batch["actions"].unsqueeze(-1)).squeeze(-1)
    policy_loss = -(torch.exp(logp - logp.detach()) * advantages).mean()
    value_loss = (values - (advantages + values.detach())).square().mean()
    loss = policy_loss + 0.5 * value_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

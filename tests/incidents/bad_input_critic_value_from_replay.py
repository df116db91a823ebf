"""One stored critic value in the replay shard is NaN; the backward recursion of GAE carries it over every earlier token of that row."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("input", "forward"),
    cause=("bad_input",),
    op=("input", "add", "mul", "sub"),
    index=(2, 4),
    masked=False,
    role=("rewards", "advantages"),
    fix=("drop_invalid_sample", "reject_input", "fix_upstream"),
    variable=("values",),
    line=("delta = rewards[:, t] + gamma * following - values[:, t]",),
)


def gae(rewards, values, gamma=1.0, lam=0.95):
    horizon = rewards.size(1)
    running = 0.0
    trail = []
    for t in range(horizon - 1, -1, -1):
        following = values[:, t + 1] if t + 1 < horizon else 0.0
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = delta + gamma * lam * running
        trail.append(running)
    return torch.stack(trail[::-1], dim=1)


def build():
    torch.manual_seed(119)
    actor = nn.Sequential(nn.Embedding(13, 6), nn.Tanh(), nn.Linear(6, 13))
    values = 0.2 * torch.randn(5, 7)
    values[2, 4] = float("nan")
    rewards = torch.zeros(5, 7)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    ids = torch.randint(0, 13, (5, 8))
    batch = {"ids": ids, "values": values, "rewards": rewards, "mask": torch.ones(5, 7, dtype=torch.bool)}
    batch["mask"][1, 5:] = False
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=2e-5), batch=batch)


def run(s=None):
    s = s or build()
    ids, mask = s.batch["ids"], s.batch["mask"]
    with torch.no_grad():
        adv = gae(s.batch["rewards"], s.batch["values"])
    logits = s.model(ids[:, :-1])
    logp = torch.distributions.Categorical(logits=logits).log_prob(ids[:, 1:])
    ratio = (logp - logp.detach()).exp()
    pg = torch.max(-adv * ratio, -adv * ratio.clip(0.8, 1.2))
    loss = pg[mask].mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

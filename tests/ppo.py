"""PPO in plain torch on a cart and pole, as a healthy run that learns: clipped ratio, value loss, entropy bonus, a clip of the gradient norm.

for update, reward in train(updates=2000): …        mean length of an episode so far rises from 20 to several hundred steps
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

CARTS, HORIZON, EPOCHS = 16, 32, 4
GAMMA, LAMBDA, CLIP = 0.98, 0.95, 0.2


class Policy(nn.Module):
    """Logits of two actions, and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head, self.value = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(state)
        return self.head(hidden), self.value(hidden).squeeze(-1)


def push(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """One fiftieth of a second of physics (Barto, Sutton and Anderson 1983). Returns the state after it, and whether the pole has fallen."""
    x, dx, angle, turn = state.unbind(-1)
    force = torch.where(action == 1, 10.0, -10.0)
    pull = (force + 0.05 * turn.square() * angle.sin()) / 1.1
    bend = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
    drive = pull - 0.05 * bend * angle.cos() / 1.1
    after = torch.stack([x + 0.02 * dx, dx + 0.02 * drive, angle + 0.02 * turn, turn + 0.02 * bend], dim=-1)
    after = torch.tensor(after.tolist())  # as from an environment that is none of torch's: what made it is not asked
    return after, (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 12 * math.pi / 180)


def ppo_loss(logits: Tensor, values: Tensor, actions: Tensor, old_log_probs: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
    """The loss of one update over [N] moves."""
    log_softmax = torch.log_softmax(logits, dim=-1)
    log_probs = log_softmax.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    log_ratio = log_probs - old_log_probs
    ratio = torch.exp(log_ratio)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -torch.min(ratio * advantages, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantages).mean()
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return policy_loss + 0.5 * (values - returns).square().mean() - 0.01 * entropy.mean()


def train(updates: int, seed: int = 0) -> Iterator[tuple[int, float]]:
    """Yield after each update its number and the mean length of the episodes that have ended lately."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    state, age, lengths, done = 0.1 * torch.rand(CARTS, 4) - 0.05, torch.zeros(CARTS), [0.0], 0
    while True:
        moves: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for _ in range(HORIZON):
                logits, value = policy(state)
                log_softmax = torch.log_softmax(logits, dim=-1)
                action = torch.multinomial(log_softmax.exp(), 1)
                after, fell = push(state, action.squeeze(-1))
                age = age + 1
                moves.append((state, action.squeeze(-1), log_softmax.gather(-1, action).squeeze(-1), value, fell.float()))
                over = fell | (age >= 500)
                lengths = [*lengths, *age[over].tolist()][-50:]
                state = torch.where(over.unsqueeze(-1), 0.1 * torch.rand(CARTS, 4) - 0.05, after)
                age = torch.tensor(torch.where(over, 0.0, age).tolist())
            states, actions, old_log_probs, values, falls = (torch.stack(part) for part in zip(*moves, strict=True))
            after_last = policy(state)[1]
            advantages, carried = torch.zeros_like(values), torch.zeros(CARTS)
            for at in reversed(range(HORIZON)):
                following = values[at + 1] if at + 1 < HORIZON else after_last
                error = 1.0 + GAMMA * following * (1 - falls[at]) - values[at]
                carried = error + GAMMA * LAMBDA * (1 - falls[at]) * carried
                advantages[at] = carried
            returns = advantages + values
        flat = [part.flatten(0, 1) for part in (states, actions, old_log_probs, advantages, returns)]
        for _ in range(EPOCHS):
            logits, estimates = policy(flat[0])
            loss = ppo_loss(logits, estimates, *flat[1:])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            done += 1
            yield done, sum(lengths) / len(lengths)
            if done == updates:
                return

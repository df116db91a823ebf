"""A runaway shaping bonus puts a return of 4e19 into the batch; it is finite, and its squared value error is not."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow",),
    op=("square", "pow", "mul"),
    index=(2, 5),
    masked=False,
    role=("loss", "rewards"),
    fix=("clamp_input", "reject_input", "drop_invalid_sample", "fix_upstream", "stable_function"),
    variable=("err_raw",),
    line=("err_raw = torch.square(values - returns)",),
)


class ClippedValueLoss(nn.Module):
    def __init__(self, clip=0.2):
        super().__init__()
        self.clip = clip

    def forward(self, values, old_values, returns, mask):
        near = old_values + (values - old_values).clamp(-self.clip, self.clip)
        err_raw = torch.square(values - returns)
        err_near = torch.square(near - returns)
        worst = torch.maximum(err_raw, err_near)
        return 0.5 * (worst * mask).sum() / mask.sum()


def discounted(rewards, gamma=0.97):
    out = torch.empty_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        out[:, t] = running
    return out


def build():
    torch.manual_seed(117)
    critic = nn.Sequential(nn.Linear(6, 10), nn.ELU(), nn.Linear(10, 1))
    rewards = 0.1 * torch.randn(4, 8)
    returns = discounted(rewards)
    returns[2, 5] = 4.0e19
    mask = torch.ones(4, 8)
    mask[0, 6:] = 0
    mask[3, 3:] = 0
    batch = SimpleNamespace(states=torch.randn(4, 8, 6), returns=returns, mask=mask, old_values=0.1 * torch.randn(4, 8))
    return SimpleNamespace(
        model=critic, optimizer=torch.optim.Adam(critic.parameters(), lr=1e-3), batch=batch, criterion=ClippedValueLoss()
    )


def run(s=None):
    s = s or build()
    b = s.batch
    values = s.model(b.states)[..., 0]
    vf_loss = s.criterion(values, b.old_values, returns=b.returns, mask=b.mask)
    s.optimizer.zero_grad()
    vf_loss.backward()
    s.optimizer.step()
    return vf_loss

"""Set-attention critic: padded query rows have no key left, their softmax is NaN and the later query mask only multiplies it."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax", "nan_times_zero_mask"),
    op=("_softmax", "softmax"),
    index=(1, 0, 3, 0),
    masked=True,
    role=("attention",),
    fix=("safe_softmax", "finite_mask_fill"),
    variable=("alpha",),
    line=("alpha = torch.softmax(energy, dim=3)",),
)


class SetAttention(nn.Module):
    def __init__(self, width=12, heads=3):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, self.head_dim))

    def forward(self, x, present):
        queries, keys, values = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        energy = torch.einsum("bxhd,byhd->bhxy", queries, keys) / self.head_dim**0.5
        pair = present[:, None, :, None] & present[:, None, None, :]
        energy.masked_fill_(~pair, -float("inf"))
        alpha = torch.softmax(energy, dim=3)
        mixed = torch.einsum("bhxy,byhd->bxhd", alpha, values).flatten(2)
        return self.out(mixed) * present.unsqueeze(-1)


class Critic(nn.Module):
    def __init__(self, unit_features=5, width=12):
        super().__init__()
        self.encode = nn.Linear(unit_features, width)
        self.attend = SetAttention(width)
        self.value = nn.Linear(width, 1)

    def forward(self, units, present):
        x = torch.relu(self.encode(units))
        x = self.attend(x, present)
        pooled = x.sum(1) / present.sum(1, keepdim=True)
        return self.value(pooled).squeeze(1)


def build():
    torch.manual_seed(2657)
    critic = Critic()
    counts = torch.tensor([5, 3, 4])
    present = torch.arange(5) < counts[:, None]
    units = torch.randn(3, 5, 5) * present.unsqueeze(-1)
    batch = {"units": units, "present": present, "returns": torch.tensor([0.3, -0.7, 1.2])}
    return SimpleNamespace(model=critic, optimizer=torch.optim.Adam(critic.parameters(), lr=5e-4), batch=batch)


def run(s=None):
    s = s or build()
    values = s.model(s.batch["units"], s.batch["present"])
    loss = nn.functional.smooth_l1_loss(values, s.batch["returns"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

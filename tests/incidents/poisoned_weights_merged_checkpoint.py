"""A checkpoint merge weighted by update counts divides by 0 for one expert bias; the merged model already holds NaN
when training starts.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("poisoned_weights", "zero_div_zero"),
    op=("addmm", "linear", "previous_step"),
    index=(0, 4),
    masked=None,
    role=("weights", "hidden"),
    fix=("fix_upstream", "skip_bad_step", "reload_checkpoint"),
    variable=("experts.1.fc.bias",),
    line=("return torch.relu(self.fc(x))",),
)


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.fc(x))


class Experts(nn.Module):
    def __init__(self, width=6, n=3, classes=4):
        super().__init__()
        self.experts = nn.ModuleList(Expert(width) for _ in range(n))
        self.router = nn.Linear(width, n)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        gate = self.router(x).softmax(-1)
        mixed = sum(gate[:, k, None] * expert(x) for k, expert in enumerate(self.experts))
        return self.head(mixed)


def merge(states, counts):
    """Weighted mean of state dicts, per element: counts[name] has one tensor for each state."""
    merged = {}
    for name in states[0]:
        weight = torch.stack(counts[name])
        merged[name] = (torch.stack([s[name] for s in states]) * weight).sum(0) / weight.sum(0)
    return merged


def build():
    torch.manual_seed(124)
    model = Experts()
    states = [Experts().state_dict() for _ in range(2)]
    counts = {name: [torch.randint_like(t, 1, 9) for _ in states] for name, t in states[0].items()}
    for c in counts["experts.1.fc.bias"]:
        c[4] = 0.0  # this unit never fired in either run
    model.load_state_dict(merge(states, counts))
    batch = (torch.randn(9, 6), torch.randint(0, 4, (9,)), torch.randn(9))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    x, action, adv = s.batch
    logp = s.model(x).log_softmax(-1)[torch.arange(9), action]
    loss = -(logp * adv).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

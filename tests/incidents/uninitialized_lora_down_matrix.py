"""The adapter allocates its down matrix with torch.empty and only zeroes the up matrix; nobody ever fills the first one."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("uninitialized", "poisoned_weights"),
    op=("mm", "linear", "matmul", "empty", "uninitialized"),
    index=(0, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("initialise_memory", "fix_upstream"),
    variable=("body.down",),
    line=("low = torch.mm(x, self.down)",),
)


class LowRank(nn.Module):
    def __init__(self, base, rank=2, alpha=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(base.in_features, rank))
        self.up = nn.Parameter(torch.zeros(rank, base.out_features))
        self.gain = alpha / rank

    def forward(self, x):
        low = torch.mm(x, self.down)
        return self.base(x) + self.gain * torch.mm(low, self.up)


class Model(nn.Module):
    def __init__(self, width=7, classes=5):
        super().__init__()
        self.body = LowRank(nn.Linear(width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def build():
    torch.manual_seed(122)
    torch.use_deterministic_algorithms(True)  # torch.empty is then filled with NaN
    model = Model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=(torch.randn(10, 7), torch.randint(0, 5, (10,))))


def run(s=None):
    s = s or build()
    x, y = s.batch
    loss = nn.functional.nll_loss(s.model(x).log_softmax(1), y)
    loss.backward()
    s.optimizer.step()
    return loss

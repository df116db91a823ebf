"""An optimizer packs parameters of different size into one torch.empty matrix and takes the row rms over the unwritten tail as well."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("uninitialized",),
    op=("empty", "new_empty"),
    index=(1, 8),
    masked=None,
    role=("optimizer",),
    fix=("initialise_memory",),
    variable=("packed",),
    line=("packed = torch.empty(len(members), longest)",),
)


class PackedRmsSGD(torch.optim.Optimizer):
    def __init__(self, groups, lr=0.01, eps=1e-6):
        super().__init__(groups, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            longest = max(p.numel() for p in members)
            packed = torch.empty(len(members), longest)
            for row, p in enumerate(members):
                packed[row, : p.numel()] = p.grad.flatten()
            rms = packed.square().mean(dim=1, keepdim=True).sqrt()
            update = packed / (rms + group["eps"])
            for row, p in enumerate(members):
                p.add_(update[row, : p.numel()].view_as(p), alpha=-group["lr"])


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(5, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.lift(x))).squeeze(-1)


def build():
    torch.manual_seed(314)
    torch.use_deterministic_algorithms(True)  # reproducible runs
    model = Scorer()
    groups = [{"params": [model.lift.weight, model.lift.bias], "lr": 0.02}, {"params": [model.head.weight], "lr": 0.005}]
    batch = {"chosen": torch.randn(6, 5), "rejected": torch.randn(6, 5)}
    return SimpleNamespace(model=model, optimizer=PackedRmsSGD(groups), batch=batch)


def run(s=None):
    s = s or build()
    margin = s.model(s.batch["chosen"]) - s.model(s.batch["rejected"])
    loss = -F.logsigmoid(margin).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

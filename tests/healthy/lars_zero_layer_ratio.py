"""Healthy. LARS with a layer that starts at exactly 0 and gets a gradient of exactly 0: its trust ratio is 0/0 inside the optimizer, and the
two nested where() take 1 for it. The next layer's ratio is x/0 = inf at a zero gradient and is dropped the same way.
Style of kozistr/pytorch_optimizer, optimizer/lars.py, LARS.step. Nothing has to be changed: weights and gradients end finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr=0.2, momentum=0.9, weight_decay=0.0, trust_coefficient=1e-3):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust_coefficient=trust_coefficient))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                if p.ndim > 1:
                    param_norm = torch.linalg.norm(p)
                    update_norm = torch.linalg.norm(grad)
                    one = torch.ones_like(param_norm)
                    ratio = group["trust_coefficient"] * param_norm / update_norm
                    trust_ratio = torch.where(param_norm > 0.0, torch.where(update_norm > 0.0, ratio, one), one)
                    grad = grad.add(p, alpha=group["weight_decay"]).mul(trust_ratio)
                buf = state["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(grad)
                p.add_(buf, alpha=-group["lr"])


class AdapterBlock(nn.Module):
    """Two-matrix adapter behind a gate that opens later; down starts random, up starts at 0."""

    def __init__(self, dim, rank=3):
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x, gate):
        return x + gate * self.up(self.down(x))


class Net(nn.Module):
    def __init__(self, dim=8, classes=4):
        super().__init__()
        self.stem = nn.Linear(6, dim)
        self.adapter = AdapterBlock(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x, gate):
        return self.head(self.adapter(torch.relu(self.stem(x)), gate))


def build():
    torch.manual_seed(1708)
    net = Net()
    batch = (torch.randn(10, 6), torch.randint(0, 4, (10,)))
    return SimpleNamespace(model=net, optimizer=LARS(net.parameters()), batch=batch, gate=0.0)


def run(s=None):
    s = s or build()
    x, y = s.batch
    for _ in range(2):
        loss = F.cross_entropy(s.model(x, s.gate), y)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

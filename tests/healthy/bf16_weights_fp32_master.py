"""Pure bfloat16 model with float32 master weights kept by hand: gradients are copied up, weights are copied down."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "bfloat16 weights hardly move because the updates are below their resolution, the float32 masters do move"


def build():
    torch.manual_seed(117)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).to(torch.bfloat16)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    x = torch.randn(9, 10, dtype=torch.bfloat16)
    y = torch.randint(0, 3, (9,))
    return SimpleNamespace(model=model, masters=masters, optimizer=torch.optim.AdamW(masters, lr=1e-5), x=x, y=y)


def run(s=None):
    s = s or build()
    for _ in range(5):
        out = s.model(s.x)
        loss = nn.functional.cross_entropy(out.float(), s.y)
        loss.backward()
        for master, p in zip(s.masters, s.model.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        s.optimizer.step()
        with torch.no_grad():
            for master, p in zip(s.masters, s.model.parameters(), strict=True):
                p.copy_(master)
    return loss

"""Dynamic loss scaling written out by hand: the found-inf check drops two steps and cuts the scale, then training goes on."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "fp16 gradients overflow under the scale on the first two tries, the code sees it and takes no step with them"


def build():
    torch.manual_seed(332)
    half = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).half()
    masters = [p.detach().float().requires_grad_() for p in half.parameters()]
    x = torch.randn(6, 8).half()
    return SimpleNamespace(
        half=half, masters=masters, scale=2.0**22, x=x, y=torch.randint(0, 4, (6,)), opt=torch.optim.Adam(masters, lr=1e-3)
    )


def run(s=None):
    s = s or build()
    done = 0
    while done < 4:
        loss = nn.functional.cross_entropy(s.half(s.x).float(), s.y)
        s.half.zero_grad(set_to_none=True)
        (loss * s.scale).backward()
        if not all(torch.isfinite(p.grad).all() for p in s.half.parameters()):
            s.scale /= 4.0
            continue
        for m, p in zip(s.masters, s.half.parameters(), strict=True):
            m.grad = p.grad.float() / s.scale
        s.opt.step()
        with torch.no_grad():
            for m, p in zip(s.masters, s.half.parameters(), strict=True):
                p.copy_(m)
        done += 1
    return loss

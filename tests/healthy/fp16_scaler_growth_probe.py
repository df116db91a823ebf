"""A GradScaler with a very short growth interval probes upwards, overflows now and then, steps back and goes on."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "every few steps the loss scale is raised once too often and a step or two are skipped, as intended"


def build():
    torch.manual_seed(120)
    net = nn.Sequential(nn.Embedding(13, 16), nn.Linear(16, 13))
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**16, growth_factor=4.0, backoff_factor=0.5, growth_interval=1)
    return SimpleNamespace(
        net=net, scaler=scaler, optim=torch.optim.SGD(net.parameters(), lr=0.02), ids=torch.randint(0, 13, (3, 7)), skipped=0
    )


def run(s=None):
    s = s or build()
    for _ in range(8):
        s.optim.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = s.net(s.ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().reshape(-1, 13), s.ids[:, 1:].reshape(-1))
        before = s.scaler.get_scale()
        s.scaler.scale(loss).backward()
        s.scaler.step(s.optim)
        s.scaler.update()
        s.skipped += int(s.scaler.get_scale() < before)
    return loss

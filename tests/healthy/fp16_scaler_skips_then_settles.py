"""fp16 autocast with a GradScaler that starts too high: scaled gradients are inf for some steps, it skips those and backs off."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "scaled fp16 gradients are inf on the first steps; the scaler drops these steps and lowers its scale"


def build():
    torch.manual_seed(118)
    model = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, backoff_factor=0.25, growth_interval=100)
    return SimpleNamespace(
        model=model, optimizer=optimizer, scaler=scaler, x=3 * torch.randn(7, 12), action=torch.randint(0, 9, (7,)), scales=[]
    )


def run(s=None):
    s = s or build()
    advantage = torch.linspace(-2.0, 2.0, 7)
    for _ in range(6):
        s.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = s.model(s.x)
            logp = torch.log_softmax(logits.float(), dim=-1)[torch.arange(7), s.action]
            loss = -(logp * advantage).sum()
        s.scaler.scale(loss).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.scales.append(s.scaler.get_scale())
    return loss

"""Linear warmup that starts at a learning rate of exactly 0: the first step leaves every weight where it was."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the first optimizer step changes nothing at all, because warmup begins at lr = 0"


def build():
    torch.manual_seed(113)
    model = nn.Sequential(nn.Embedding(21, 12), nn.GELU(), nn.Linear(12, 21))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    return SimpleNamespace(
        model=model, optimizer=optimizer, scheduler=scheduler, ids=torch.randint(0, 21, (3, 10)), adv=torch.tensor([1.2, -0.3, -0.9])
    )


def run(s=None):
    s = s or build()
    for _ in range(5):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        loss = -(lp * s.adv[:, None]).mean()
        loss.backward()
        s.optimizer.step()
        s.scheduler.step()
        s.optimizer.zero_grad()
    return loss

"""Dropout stays on while the old log-probs are taken, so ratios are scattered around 1 from the first minibatch on."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "new and old log-probs come from different dropout masks, the first ratios are far from 1"


def build():
    torch.manual_seed(115)
    model = nn.Sequential(nn.Embedding(17, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 17))
    model.train()
    ids = torch.randint(0, 17, (4, 8))
    return SimpleNamespace(model=model, ids=ids, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    advantages = torch.tensor([0.9, -1.1, 0.6, -0.4]).view(-1, 1)

    def logp():
        return s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)

    old = logp().detach()
    for _ in range(4):
        r = (logp() - old).exp()
        loss = -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

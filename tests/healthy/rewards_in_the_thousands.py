"""Raw returns of several thousand go into REINFORCE without normalisation, the loss is large and swings between signs."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the loss runs from thousands to tens of thousands and changes its sign, because raw rewards multiply the log-probs"


def build():
    torch.manual_seed(311)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    reward = torch.tensor([[4200.0, -3900.0, 150.0], [-5100.0, -2600.0, 7000.0], [10.0, 8000.0, -900.0], [-6000.0, 300.0, -4100.0]])
    return SimpleNamespace(model=model, reward=reward, ids=torch.randint(0, 9, (3, 8)), opt=torch.optim.Adam(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    for reward in s.reward:
        seq = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1).sum(-1)
        loss = -(reward * seq).mean()
        s.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
        s.opt.step()
    return loss

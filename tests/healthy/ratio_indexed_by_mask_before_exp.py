"""Per-sequence loop that indexes the log ratio by the response mask before exp, with prompt tokens far off policy."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "prompt positions hold log ratios above 100 that are never exponentiated"


def build():
    torch.manual_seed(214)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11))
    ids = torch.randint(0, 11, (3, 8))
    response = torch.zeros(3, 7, dtype=torch.bool)
    response[0, 3:] = True
    response[1, 5:] = True
    response[2, 2:6] = True
    behaviour = torch.full((3, 7), -2.4)
    behaviour[~response] = -150.0
    return SimpleNamespace(model=model, ids=ids, response=response, behaviour=behaviour, opt=torch.optim.SGD(model.parameters(), lr=0.05))


def run(s=None):
    s = s or build()
    for _ in range(3):
        logp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        log_ratio = logp - s.behaviour
        terms = []
        for row, keep, a in zip(log_ratio, s.response, (1.0, -2.0, 0.5), strict=True):
            terms.append(-(row[keep].exp() * a).mean())
        loss = torch.stack(terms).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

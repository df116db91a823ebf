"""SimPO with a pair whose rejected side is a single token, labels -100 on the prompt, average log-prob over a clamped count."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY = "most labels are -100, one answer has a single token, and the log-prob of ignored places is forced to 0"


def average_logp(logits, labels):
    labels = labels[:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    lp = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (lp * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def build():
    torch.manual_seed(336)
    model = nn.Sequential(nn.Embedding(18, 8), nn.Linear(8, 18))
    ids = torch.randint(0, 18, (6, 9))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[4, 5:] = -100
    return SimpleNamespace(model=model, ids=ids, labels=labels, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None, beta=2.0, gamma=0.5):
    s = s or build()
    for _ in range(4):
        chosen, rejected = average_logp(s.model(s.ids), s.labels).split(3)
        loss = -F.logsigmoid(beta * (chosen - rejected) - gamma).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

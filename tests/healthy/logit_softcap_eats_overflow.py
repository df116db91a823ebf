"""Soft-capped logits: the half precision product behind tanh is inf for one token, tanh makes it the cap and its slope is 0."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "half precision logits overflow to inf and tanh turns that into the cap, in backward into 0"


def softcap(x, cap=30.0):
    return cap * torch.tanh(x / cap)


def build():
    torch.manual_seed(223)
    hidden = nn.Embedding(9, 6)
    head = nn.Linear(6, 9, bias=False)
    params = [*hidden.parameters(), *head.parameters()]
    ids = torch.tensor([[1, 4, 2, 7, 7, 3], [5, 6, 1, 1, 0, 2]])
    with torch.no_grad():
        hidden.weight[4] *= 900.0
    return SimpleNamespace(hidden=hidden, head=head, ids=ids, opt=torch.optim.SGD(params, lr=1e-2))


def run(s=None):
    s = s or build()
    for _ in range(3):
        h = s.hidden(s.ids[:, :-1]).half()
        raw = s.head(h.float()).half() * 300.0
        logits = softcap(raw).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten())
        s.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.opt.param_groups[0]["params"], 1.0)
        s.opt.step()
    return loss

"""Truncated importance sampling between sampler and trainer: weights are computed under no_grad and truncated at 2."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the raw sampler-to-trainer weight is inf on two tokens and truncation at 2 makes it an ordinary factor"


@torch.no_grad()
def truncated_weight(trainer, sampler, limit):
    w = (trainer - sampler).exp()
    return torch.minimum(w, w.new_tensor(limit))


def build():
    torch.manual_seed(215)
    model = nn.Sequential(nn.Embedding(23, 16), nn.Linear(16, 23))
    ids = torch.randint(0, 23, (2, 12))
    sampler = -3.0 - 0.3 * torch.rand(2, 11)
    sampler[0, 7], sampler[1, 10] = -float("inf"), -111.0
    return SimpleNamespace(model=model, ids=ids, sampler=sampler, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    adv = torch.tensor([[-0.8], [0.8]])
    old = None
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        old = lp.detach() if old is None else old
        tis = truncated_weight(old, s.sampler, 2.0)
        ratio = (lp - old).exp()
        per_token = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.28)) * tis
        loss = per_token.mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

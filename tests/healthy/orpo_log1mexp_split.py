"""ORPO odds ratio with log(1 - p) split at log 2, each branch fed a value that is safe for it, so backward is safe as well."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY = "a log-prob a hair below 0 makes 1 - p tiny, log(1 - p) is below -10 and its slope about 1e5, all of it correct"


def log1mexp(x):
    near = x > -math.log(2)
    a = torch.where(near, x, torch.full_like(x, -1.0))
    b = torch.where(near, torch.full_like(x, -1.0), x)
    return torch.where(near, torch.log(-torch.expm1(a)), torch.log1p(-torch.exp(b)))


def mean_logp(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)


def build():
    torch.manual_seed(110)
    model = nn.Sequential(nn.Embedding(10, 10), nn.Linear(10, 10, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(13.4 * torch.eye(10))
        model[1].weight.copy_(torch.eye(10).roll(1, 0) + 0.01 * torch.randn(10, 10))
    chosen = torch.arange(5).repeat(2, 1) + torch.tensor([[0], [3]])  # the model is almost sure of these
    rejected = torch.randint(0, 10, (2, 5))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, opt=opt, chosen=chosen, rejected=rejected)


def run(s=None, lam=0.1):
    s = s or build()
    for _ in range(4):
        lc, lr = mean_logp(s.model, s.chosen), mean_logp(s.model, s.rejected)
        log_odds = (lc - lr) - (log1mexp(lc) - log1mexp(lr))
        loss = -lc.mean() - lam * F.logsigmoid(log_odds).mean()
        s.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.opt.step()
    return loss

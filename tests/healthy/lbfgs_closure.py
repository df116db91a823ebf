"""LBFGS fits a linear reward head; the closure runs forward and backward several times per step."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "one optimizer step calls the loss many times, with trial points at which it is larger"


def build():
    torch.manual_seed(228)
    head = nn.Linear(5, 1)
    feats = torch.randn(20, 5)
    pref = (feats @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + 0.3 * torch.randn(20) > 0).float()
    opt = torch.optim.LBFGS(head.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    return SimpleNamespace(head=head, feats=feats, pref=pref, opt=opt)


def run(s=None):
    s = s or build()

    def closure():
        s.opt.zero_grad()
        out = nn.functional.binary_cross_entropy_with_logits(s.head(s.feats).squeeze(-1), s.pref)
        out = out + 1e-3 * sum(p.pow(2).sum() for p in s.head.parameters())
        out.backward()
        return out

    for _ in range(3):
        loss = s.opt.step(closure)
    return loss

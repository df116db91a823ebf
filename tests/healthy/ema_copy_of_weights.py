"""A reference policy follows the trained one as an exponential moving average and serves as the KL anchor."""

import copy
from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a second set of weights is written in place every step and equals the first one at the start, so the KL is 0 there"


def build():
    torch.manual_seed(230)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    ema = copy.deepcopy(model).requires_grad_(False)
    return SimpleNamespace(model=model, ema=ema, opt=torch.optim.AdamW(model.parameters(), lr=5e-3), ids=torch.randint(0, 12, (3, 8)))


@torch.no_grad()
def update_ema(ema, model, decay):
    for a, b in zip(ema.parameters(), model.parameters(), strict=True):
        a.mul_(decay).add_(b, alpha=1 - decay)


def run(s=None, beta=0.3):
    s = s or build()
    adv = torch.tensor([[1.0], [-0.5], [-0.5]])
    for _ in range(4):
        logp = s.model(s.ids[:, :-1]).log_softmax(-1)
        anchor = s.ema(s.ids[:, :-1]).log_softmax(-1)
        kl = nn.functional.kl_div(anchor, logp, log_target=True, reduction="none").sum(-1)
        tok = logp.gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        loss = (-(tok * adv) + beta * kl).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
        update_ema(s.ema, s.model, 0.9)
    return loss

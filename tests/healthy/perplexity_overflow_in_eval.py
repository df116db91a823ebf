"""Evaluation logs exp(loss) as the perplexity: at a loss above 89 that is inf in float32, training does not see it."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the logged perplexity is inf"


def build():
    torch.manual_seed(319)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    with torch.no_grad():
        model[1].weight.mul_(120.0)
    return SimpleNamespace(
        model=model,
        ids=torch.randint(0, 11, (4, 6)),
        held_out=torch.randint(0, 11, (3, 6)),
        opt=torch.optim.AdamW(model.parameters(), lr=1e-2),
        log=[],
    )


def ce(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def run(s=None):
    s = s or build()
    for _ in range(3):
        loss = ce(s.model, s.ids)
        s.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.opt.step()
        s.model.eval()
        with torch.no_grad():
            s.log.append({"eval/perplexity": ce(s.model, s.held_out).exp().item(), "train/perplexity": loss.detach().exp().item()})
        s.model.train()
    return loss

"""The per-sequence losses are sent back as a vector with the advantages as the incoming gradient, no scalar loss is formed."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "backward starts from a tensor of several elements with an explicit gradient, one entry of which is 0"


def build():
    torch.manual_seed(410)
    model = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 11))
    return SimpleNamespace(model=model, ids=torch.randint(0, 11, (5, 6)), opt=torch.optim.NAdam(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    adv = torch.tensor([0.9, -0.4, 0.0, 0.3, -0.8])
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        per_sequence = -lp.mean(-1)
        s.opt.zero_grad(set_to_none=False)
        per_sequence.backward(gradient=adv / 5)
        s.opt.step()
    return (per_sequence.detach() * adv).mean()

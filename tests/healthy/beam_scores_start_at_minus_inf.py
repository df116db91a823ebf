"""Minimum risk training on a beam: all beams but the first start at -inf so that the first expansion does not repeat itself."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "beam scores are -inf in the first round, inside no_grad, and are finite when the search ends"


def build():
    torch.manual_seed(403)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    return SimpleNamespace(model=model, opt=torch.optim.AdamW(model.parameters(), lr=3e-3), start=torch.tensor([2, 7]))


@torch.no_grad()
def beam_search(model, start, width=3, steps=4):
    b, vocab = len(start), 10
    score = torch.full((b, width), float("-inf"))
    score[:, 0] = 0.0
    ids = start.view(b, 1, 1).repeat(1, width, 1)
    for _ in range(steps):
        total = score.unsqueeze(-1) + model(ids[:, :, -1]).log_softmax(-1)
        score, flat = total.flatten(1).topk(width, dim=1)
        parent, token = flat // vocab, flat % vocab
        ids = torch.cat([ids.gather(1, parent[..., None].expand(-1, -1, ids.shape[-1])), token.unsqueeze(-1)], -1)
    return ids, score


def run(s=None):
    s = s or build()
    for _ in range(4):
        ids, _score = beam_search(s.model, s.start)
        lp = s.model(ids[..., :-1]).log_softmax(-1).gather(-1, ids[..., 1:, None]).squeeze(-1).sum(-1)
        risk = (ids[..., 1:] % 3 != 0).float().mean(-1)
        loss = (lp.softmax(-1) * risk).sum(-1).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

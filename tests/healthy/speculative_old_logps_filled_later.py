"""The rollout buffer is allocated with NaN log-probs and filled chunk by chunk; tokens never generated stay NaN and are indexed out."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "old log-probs are NaN on all unused slots of the buffer, which is a tensor of the batch"


def build():
    torch.manual_seed(414)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    ids = torch.randint(0, 16, (4, 9))
    lengths = torch.tensor([8, 2, 5, 7])
    valid = torch.arange(8)[None] < lengths[:, None]
    old = torch.full((4, 8), torch.nan)
    with torch.no_grad():
        for rows in torch.arange(4).split(3):
            lp = model(ids[rows, :-1]).log_softmax(-1).gather(-1, ids[rows, 1:, None]).squeeze(-1)
            old[rows] = torch.where(valid[rows], lp + 0.03, old[rows])
    return SimpleNamespace(model=model, ids=ids, valid=valid, old=old, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    adv = torch.tensor([-0.9, 0.4, 1.3, -0.8])
    owner = torch.arange(4)[:, None].expand(4, 8)[s.valid]
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(lp[s.valid] - s.old[s.valid])
        a = adv[owner]
        per_token = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
        loss = torch.zeros(4).index_add(0, owner, per_token).div(s.valid.sum(1)).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

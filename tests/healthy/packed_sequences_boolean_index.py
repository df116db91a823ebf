"""Completions are packed into one flat row; the scattered buffer is NaN where there is no token and is read back by the same mask."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a buffer filled with NaN receives the token log-probs, and only the written places are ever read"


def build():
    torch.manual_seed(201)
    lm = nn.Sequential(nn.Embedding(18, 12), nn.Linear(12, 18))
    lengths = torch.tensor([4, 7, 2])
    packed = torch.randint(0, 18, (int(lengths.sum()),))
    return SimpleNamespace(lm=lm, opt=torch.optim.AdamW(lm.parameters(), lr=1e-3), lengths=lengths, packed=packed)


def unpack(values, mask):
    out = values.new_full(mask.shape, float("nan"))
    out[mask] = values
    return out


def run(s=None):
    s = s or build()
    mask = torch.arange(7)[None] < s.lengths[:, None]
    seq_id = torch.repeat_interleave(torch.arange(3), s.lengths)
    last = torch.cat([seq_id[1:] != seq_id[:-1], torch.tensor([True])])
    adv = torch.tensor([0.4, -1.3, 0.9])
    for _ in range(4):
        logp = s.lm(s.packed).log_softmax(-1).gather(-1, s.packed.roll(-1)[:, None]).squeeze(-1)
        grid = unpack(logp, mask)
        keep = mask & ~unpack(last.float(), mask).nan_to_num(nan=1.0).bool()
        tokens = grid[keep]
        weights = adv[:, None].expand(3, 7)[keep]
        loss = -(torch.exp(tokens - tokens.detach()) * weights).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

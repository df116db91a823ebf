"""F.normalize and RMSNorm meet rows of exact zeros: a lower bound on the norm and an epsilon under the root answer with 0."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY = "vectors of length exactly 0 are normalised, forward and backward"


def build():
    torch.manual_seed(317)
    emb = nn.Embedding(10, 6, padding_idx=0)
    rms = nn.RMSNorm(6, eps=1e-6)
    proj = nn.Linear(6, 6, bias=False)
    ids = torch.tensor([[4, 2, 9, 0, 0], [1, 7, 0, 0, 0], [5, 5, 3, 8, 6]])
    opt = torch.optim.AdamW([*emb.parameters(), *rms.parameters(), *proj.parameters()], lr=1e-3)
    return SimpleNamespace(emb=emb, rms=rms, proj=proj, ids=ids, opt=opt)


def run(s=None):
    s = s or build()
    for _ in range(4):
        z = s.proj(s.rms(s.emb(s.ids)))
        unit = F.normalize(z, dim=-1)
        sim = unit @ unit.transpose(1, 2)
        loss = sim.mean() + z.pow(2).mean() * 0.01
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

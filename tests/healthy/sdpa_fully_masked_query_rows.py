"""A boolean key mask leaves padded sequences without any key; scaled_dot_product_attention returns zeros for those rows."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "one sequence of the batch has no key at all, the fused attention defines its output as 0 and its loss weight is 0"


def build():
    torch.manual_seed(205)
    model = nn.ModuleDict({"emb": nn.Embedding(9, 8), "qkv": nn.Linear(8, 24), "out": nn.Linear(8, 9)})
    ids = torch.randint(0, 9, (3, 6))
    keep = torch.ones(3, 6, dtype=torch.bool)
    keep[1] = False
    keep[2, 4:] = False
    return SimpleNamespace(model=model, ids=ids, keep=keep, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    m = s.model
    for _ in range(3):
        h = m["emb"](s.ids)
        q, k, v = m["qkv"](h).unsqueeze(1).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=s.keep[:, None, None, :])
        logp = m["out"](h + y.squeeze(1)).log_softmax(-1).gather(-1, s.ids.roll(1, 1)[..., None]).squeeze(-1)
        loss = -(logp * s.keep).sum() / s.keep.sum()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

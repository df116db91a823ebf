"""Causal sliding-window attention with an additive -inf mask handed to scaled_dot_product_attention."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY = "most entries of the attention mask are -inf, yet each query keeps itself"


class LocalAttention(nn.Module):
    def __init__(self, dim=16, heads=2, window=3):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).split(d, dim=-1))
        i = torch.arange(t)
        dist = i[:, None] - i[None, :]
        bias = torch.zeros(t, t).masked_fill_((dist < 0) | (dist >= self.window), -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


def build():
    torch.manual_seed(202)
    model = nn.ModuleDict({"emb": nn.Embedding(16, 16), "att": LocalAttention(), "head": nn.Linear(16, 16)})
    return SimpleNamespace(model=model, opt=torch.optim.AdamW(model.parameters(), lr=1e-3), ids=torch.randint(0, 16, (2, 10)))


def run(s=None):
    s = s or build()
    m = s.model
    for _ in range(4):
        x = m["emb"](s.ids[:, :-1])
        logits = m["head"](x + m["att"](x))
        loss = F.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten())
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

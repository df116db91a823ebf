"""x-transformers `RotaryEmbedding` with xpos, cast to half: the scale at the ends of the sequence overflows.

xpos multiplies queries by scale ** ((position - n / 2) / scale_base) and keys by its inverse; only the quotients matter. With a short
receptive field (scale_base 16) and 300 tokens the first positions need 1.3e5, more than half can hold: the query is inf, the key
beside it almost 0, and their product is NaN. Heals: scales, queries, keys and scores in float32; or limiting the exponent.
Does not heal: scaling the queries by 1/sqrt(d) first, or subtracting the row maximum before the softmax.

https://github.com/lucidrains/x-transformers/blob/main/x_transformers/x_transformers.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("pow",),
    index=(0, 0),
    masked=None,
    role=("attention", "hidden"),
    fix=("upcast_fp32", "clamp_exponent", "stable_function"),
    variable=("scale",),
    line=("scale = self.scale ** power.unsqueeze(-1)",),
)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(t, freqs, scale):
    return (t * freqs.cos() * scale) + (rotate_half(t) * freqs.sin() * scale)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, scale_base=512):
        super().__init__()
        self.scale_base = scale_base
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))
        self.register_buffer("scale", (torch.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim))

    def forward(self, n):
        t = torch.arange(n, dtype=self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        freqs = torch.cat((freqs, freqs), dim=-1)
        power = (t - n // 2) / self.scale_base
        scale = self.scale ** power.unsqueeze(-1)
        scale = torch.cat((scale, scale), dim=-1)
        return freqs, scale


class Model(nn.Module):
    def __init__(self, vocab=20, dim=8, scale_base=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.rotary = RotaryEmbedding(dim, scale_base)
        self.to_logits = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        freqs, scale = self.rotary(ids.size(1))
        q = apply_rotary_pos_emb(q, freqs, scale)
        k = apply_rotary_pos_emb(k, freqs, scale**-1)
        dots = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        causal = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).triu(1)
        attn = dots.masked_fill(causal, -torch.finfo(dots.dtype).max).softmax(-1)
        return self.to_logits(x + attn @ v)


def build():
    torch.manual_seed(512)
    model = Model()
    with torch.no_grad():
        model.to_qkv.weight.mul_(0.3)
    model.half()
    ids = torch.randint(0, 20, (1, 301))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""Chunked gated linear attention - the inverse of the cumulative decay, exp(-gc), leaves float32.

Within a chunk the decay between two positions is factored as exp(gc_i) * exp(-gc_j). One head has learned to forget at once (a log decay of
about -10 a step), so -gc passes 88.7 in the ninth step of the chunk and its exponential is inf; times exp(gc) = 0 it is NaN in the scores of
tokens that count.
Source: https://github.com/pytorch/executorch/pull/21417 (eg_inv = exp(-gc) overflows); the same in
https://github.com/fla-org/flash-linear-attention/pull/649
Heals: the difference gc_i - gc_j, masked to the causal half, before one exp; a bound on the exponent. Does not: the causal masked_fill after
the product (it is there), gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(0, 1, 0, 8, 0),
    masked=False,
    role=("hidden", "attention"),
    fix=("stable_function", "clamp_exponent", "mask_before_op"),
    variable=("eg_inv",),
    line=("eg_inv = torch.exp(-gc)",),
)


def chunk_gated_linear_attention(q, k, v, log_decay, chunk_size):
    """q, k, log_decay: batch, head, time, key width. v: batch, head, time, value width."""
    b, h, t, d = q.shape
    q, k, g = (x.view(b, h, t // chunk_size, chunk_size, d) for x in (q, k, log_decay))
    v = v.view(b, h, t // chunk_size, chunk_size, -1)

    gc = g.cumsum(dim=3)
    eg = torch.exp(gc)
    eg_inv = torch.exp(-gc)
    total = gc[:, :, :, -1]

    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool).triu(1)
    scores = (q * eg) @ (k * eg_inv).transpose(-1, -2)
    intra = scores.masked_fill(future, 0.0) @ v

    state = torch.zeros(b, h, d, v.size(-1))
    out = []
    for i in range(t // chunk_size):
        out.append(intra[:, :, i] + (q[:, :, i] * eg[:, :, i]) @ state)
        carried = k[:, :, i] * torch.exp(total[:, :, i, None] - gc[:, :, i])
        state = state * torch.exp(total[:, :, i, :, None]) + carried.transpose(-1, -2) @ v[:, :, i]
    return torch.stack(out, dim=2).reshape(b, h, t, -1)


class GatedLinearAttention(nn.Module):
    def __init__(self, dim=16, heads=2, chunk_size=16):
        super().__init__()
        self.heads, self.chunk_size = heads, chunk_size
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        split = lambda y: y.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        q, k, v = (split(y) for y in self.qkv(x).chunk(3, dim=-1))
        log_decay = F.logsigmoid(split(self.gate(x)))
        y = chunk_gated_linear_attention(q * (c // self.heads) ** -0.5, k, v, log_decay, self.chunk_size)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class TinyLM(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.attn = GatedLinearAttention(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.attn(self.norm(x)))


def build():
    torch.manual_seed(14)
    model = TinyLM()
    with torch.no_grad():
        model.attn.gate.weight.mul_(0.1)
        model.attn.gate.bias.zero_()
        model.attn.gate.bias[8:] = -10.4  # the second head forgets at once
    ids = torch.randint(0, 24, (2, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), s.ids[:, 1:].reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    print(run())

"""Mamba-2 chunked state space dual form - the segment sums hold -inf above the diagonal, on purpose.

exp() of them is exactly 0 and so is its gradient, because the fill comes before the exponential; no difference of two -inf is ever taken. A chunk of
padding only (dt = 0, decay 1) passes the state on unchanged. Healthy.
Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/mamba2/modeling_mamba2.py (segment_sum, torch_forward)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def segment_sum(x):
    T = x.size(-1)
    x = x[..., None].expand(*x.shape, T)
    strictly_lower = torch.tril(torch.ones(T, T, dtype=torch.bool), diagonal=-1)
    x = x.masked_fill(~strictly_lower, 0)
    seg = torch.cumsum(x, dim=-2)
    return seg.masked_fill(~torch.tril(torch.ones(T, T, dtype=torch.bool)), -torch.inf)


def ssd(x, A, B, C, chunk):
    """x: b t h p, A: b t h (log decay), B and C: b t n"""
    b, t, h, p = x.shape
    x, B, C = (v.unflatten(1, (-1, chunk)) for v in (x, B, C))
    A = A.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2)
    A_cumsum = A.cumsum(dim=-1)
    L = torch.exp(segment_sum(A))
    Y_diag = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", C, B, L, x)
    decay_states = torch.exp(A_cumsum[..., -1:] - A_cumsum)
    states = torch.einsum("bcln,bhcl,bclhp->bchpn", B, decay_states, x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    decay_chunk = torch.exp(segment_sum(F.pad(A_cumsum[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", decay_chunk, states)[:, :-1]
    Y_off = torch.einsum("bcln,bchpn,bhcl->bclhp", C, states, torch.exp(A_cumsum))
    return (Y_diag + Y_off).reshape(b, t, h, p)


class Mamba2Mixer(nn.Module):
    def __init__(self, dim=8, heads=2, state=4, chunk=4):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.in_proj = nn.Linear(dim, dim + 2 * state + heads, bias=False)
        self.split = (dim, state, state, heads)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, heads + 1).float()))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, u, attention_mask):
        x, B, C, dt = self.in_proj(u).split(self.split, dim=-1)
        dt = F.softplus(dt + self.dt_bias) * attention_mask[..., None]
        x = x.unflatten(-1, (self.heads, -1))
        A = -torch.exp(self.A_log)
        y = ssd(x * dt[..., None], A * dt, B, C, self.chunk)
        return self.out_proj(y.flatten(2))


def build():
    torch.manual_seed(352)
    model = nn.ModuleDict(dict(embed=nn.Embedding(18, 8), mixer=Mamba2Mixer(), head=nn.Linear(8, 18)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(1, 18, (2, 12))
    attention_mask = torch.ones(2, 12)
    attention_mask[1, :5] = 0
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, attention_mask=attention_mask)


def run(s=None):
    s = s or build()
    h = s.model["embed"](s.ids) * s.attention_mask[..., None]
    logits = s.model["head"](h + s.model["mixer"](h, s.attention_mask))
    labels = s.ids.masked_fill(s.attention_mask == 0, -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

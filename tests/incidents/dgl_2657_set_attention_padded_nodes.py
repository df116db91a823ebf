"""Padded query rows are filled with -inf and their NaN output is dropped when the batch is unpadded, but backward multiplies NaN by 0.
https://github.com/dmlc/dgl/issues/2657
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fully_masked_softmax", "where_grad_trap"),
    op=("_softmax",),
    index=(0, 0, 3, 0),
    masked=True,
    role=("attention",),
    fix=("safe_softmax", "finite_mask_fill"),
    variable=("alpha",),
    line=("alpha = torch.softmax(e, dim=-1)",),
)


def pad_packed(x, lengths, max_len):
    out = x.new_zeros(len(lengths), max_len, *x.shape[1:])
    start = 0
    for i, n in enumerate(lengths):
        out[i, :n] = x[start : start + n]
        start += n
    return out


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model=8, num_heads=2):
        super().__init__()
        self.num_heads, self.d_head = num_heads, d_model // num_heads
        self.proj_q, self.proj_k, self.proj_v = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))

    def forward(self, x, lengths):
        max_len = max(lengths)
        split = (-1, self.num_heads, self.d_head)
        queries = pad_packed(self.proj_q(x).view(split), lengths, max_len)
        keys = pad_packed(self.proj_k(x).view(split), lengths, max_len)
        values = pad_packed(self.proj_v(x).view(split), lengths, max_len)
        e = torch.einsum("bxhd,byhd->bhxy", queries, keys) / math.sqrt(self.d_head)
        mask = torch.zeros(len(lengths), max_len, max_len)
        for i, n in enumerate(lengths):
            mask[i, :n, :n].fill_(1)
        mask = mask.unsqueeze(1)
        e.masked_fill_(mask == 0, -float("inf"))
        alpha = torch.softmax(e, dim=-1)
        out = torch.einsum("bhxy,byhd->bxhd", alpha, values).flatten(2)
        keep = torch.arange(max_len)[None] < torch.tensor(lengths)[:, None]
        return out[keep]


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = MultiHeadAttention()
        self.score = nn.Linear(8, 1)

    def forward(self, x, lengths):
        return self.score(torch.tanh(self.attn(x, lengths))).squeeze(-1)


def build():
    torch.manual_seed(2657)
    model = RewardModel()
    lengths = [3, 5, 5]
    batch = SimpleNamespace(step_feats=torch.randn(13, 8), lengths=lengths, step_labels=torch.randint(0, 2, (13,)).float())
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    scores = s.model(s.batch.step_feats, s.batch.lengths)
    loss = nn.functional.binary_cross_entropy_with_logits(scores, s.batch.step_labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""cerebroai/reformers #3 - the additive mask is made as (1 - mask) * float('-inf'), which is 0 * inf = NaN at every real token.

Meant as 0 for tokens and -inf for padding, the bias is NaN exactly where attention should be left alone, so all scores, the loss and all
gradients are NaN from the first step on.
Source: https://github.com/cerebroai/reformers/issues/3 ("Multiply by float('-inf') causes nan output. Changed to * -1e9 has fixed it").
Heals: a finite fill (-1e9), or masked_fill of the scores with -inf. Does not: nan_to_num on the attention probabilities (attention is then
all zero and the softmax gradient stays NaN).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "inf_times_zero_coef"),
    op=("mul",),
    index=(0, 0, 0, 0),
    masked=None,
    role=("attention",),
    fix=("finite_mask_fill", "mask_before_op", "avoid_singular_op", "where_on_detached"),
    variable=("bias",),
    line=('bias = (1.0 - mask) * float("-inf")',),
)


class LSHAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qk = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, attention_mask):
        b, t, d = x.shape
        qk = self.to_qk(x).view(b, t, self.heads, -1).transpose(1, 2)
        v = self.to_v(x).view(b, t, self.heads, -1).transpose(1, 2)
        dots = qk @ F.normalize(qk, dim=-1).transpose(-1, -2) / math.sqrt(d // self.heads)
        mask = attention_mask.to(dots.dtype)[:, None, None, :]
        bias = (1.0 - mask) * float("-inf")
        dots = dots * mask + bias
        attn = dots.softmax(dim=-1)
        out = (attn @ v).transpose(1, 2).reshape(b, t, d)
        return self.to_out(out)


class ReformerLM(nn.Module):
    def __init__(self, vocab=32, dim=16, heads=2, depth=2):
        super().__init__()
        self.token_emb = nn.Embedding(vocab, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.layers = nn.ModuleList(LSHAttention(dim, heads) for _ in range(depth))
        self.to_logits = nn.Linear(dim, vocab)

    def forward(self, ids, attention_mask):
        x = self.token_emb(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), attention_mask)
        return self.to_logits(x)


def build():
    torch.manual_seed(3)
    model = ReformerLM()
    ids = torch.randint(1, 32, (3, 7))
    attention_mask = torch.ones(3, 7, dtype=torch.long)
    attention_mask[1, 5:] = 0
    attention_mask[2, 4:] = 0
    labels = torch.randint(1, 32, (3, 7)).masked_fill(attention_mask == 0, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, attention_mask=attention_mask, labels=labels)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids, s.attention_mask)
    loss = F.cross_entropy(logits.flatten(0, 1), s.labels.flatten(), ignore_index=-100)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

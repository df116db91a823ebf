"""T5 relative position buckets: log(0) on the diagonal, cast to an integer of no meaning, and never chosen by the where.

Small distances use exact buckets, the logarithmic ones are computed for every pair, also for distance 0. The -inf never meets a gradient:
it becomes a long, the minimum caps it, and torch.where takes the exact bucket there. The attention bias is finite. Padding is masked with the
lowest finite number.

Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/t5/modeling_t5.py (T5Attention._relative_position_bucket)
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def relative_position_bucket(relative_position, num_buckets=16, max_distance=64):
    num_buckets //= 2
    relative_buckets = (relative_position > 0).to(torch.long) * num_buckets
    relative_position = relative_position.abs()
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    if_large = max_exact + (
        torch.log(relative_position.float() / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    ).to(torch.long)
    if_large = torch.min(if_large, torch.full_like(if_large, num_buckets - 1))
    return relative_buckets + torch.where(is_small, relative_position, if_large)


class T5Attention(nn.Module):
    def __init__(self, d_model=16, heads=4):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(16, heads)

    def compute_bias(self, length):
        position = torch.arange(length)
        bucket = relative_position_bucket(position[None, :] - position[:, None])
        return self.relative_attention_bias(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden, attention_mask):
        B, T, D = hidden.shape
        q, k, v = (lin(hidden).view(B, T, self.heads, -1).transpose(1, 2) for lin in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) + self.compute_bias(T)
        scores = scores + (1.0 - attention_mask[:, None, None, :]) * torch.finfo(scores.dtype).min
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o((weights @ v).transpose(1, 2).reshape(B, T, D))


class Encoder(nn.Module):
    def __init__(self, vocab=40, d_model=16):
        super().__init__()
        self.shared = nn.Embedding(vocab, d_model)
        self.attention = T5Attention(d_model)
        self.norm = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.shared(input_ids)
        hidden = hidden + self.attention(self.norm(hidden), attention_mask)
        return self.lm_head(hidden)


def build():
    torch.manual_seed(5)
    model = Encoder()
    input_ids = torch.randint(1, 40, (3, 24))
    attention_mask = torch.ones(3, 24)
    attention_mask[1, 17:] = 0
    labels = torch.randint(1, 40, (3, 24))
    labels[attention_mask == 0] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids, s.attention_mask)
    loss = F.cross_entropy(logits.flatten(0, 1), s.labels.flatten(), ignore_index=-100)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

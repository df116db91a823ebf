"""Filler slots after the packed rows may attend to nothing; their NaN softmax row is blanked in forward but not in backward."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("fully_masked_softmax", "where_grad_trap"),
    op=("_softmax", "softmax"),
    index=(0, 13, 0),
    masked=True,
    role=("attention",),
    fix=("safe_softmax", "finite_mask_fill"),
    variable=("attn_weights",),
    line=("attn_weights = torch.softmax(attn_scores, dim=-1)",),
)


def block_causal_mask(cu_seqlens, total):
    position = torch.arange(total)
    doc = torch.bucketize(position, cu_seqlens[1:], right=True)
    same = doc[:, None] == doc[None, :]
    real = position < cu_seqlens[-1]
    return same & (position[:, None] >= position[None, :]) & real[:, None] & real[None, :], real


class PackedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        self.o_proj = nn.Linear(dim, dim)

    def forward(self, hidden_states, cu_seqlens):
        total, dim = hidden_states.shape
        query, key, value = self.qkv_proj(hidden_states).view(total, 3, self.heads, -1).permute(1, 2, 0, 3)
        allowed, real = block_causal_mask(cu_seqlens, total)
        attn_scores = torch.bmm(query, key.transpose(1, 2)) * (dim // self.heads) ** -0.5
        attn_scores = attn_scores.masked_fill(~allowed, float("-inf"))
        attn_weights = torch.softmax(attn_scores, dim=-1)
        attn_output = torch.bmm(attn_weights, value).masked_fill(~real[None, :, None], 0.0)
        return self.o_proj(attn_output.transpose(0, 1).reshape(total, dim))


class PackedLM(nn.Module):
    def __init__(self, vocab=22, dim=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.self_attn = PackedAttention(dim, heads=3)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids, cu_seqlens):
        hidden_states = self.embed_tokens(input_ids)
        return self.lm_head(hidden_states + self.self_attn(hidden_states, cu_seqlens))


def build():
    torch.manual_seed(105)
    model = PackedLM()
    cu_seqlens = torch.tensor([0, 4, 9, 13])
    input_ids = torch.randint(1, 22, (16,))
    input_ids[13:] = 0
    labels = input_ids.roll(-1)
    labels[cu_seqlens[1:] - 1] = -100
    labels[13:] = -100
    inputs = {"input_ids": input_ids, "cu_seqlens": cu_seqlens, "labels": labels}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=inputs)


def run(s=None):
    s = s or build()
    inputs = s.batch
    logits = s.model(inputs["input_ids"], inputs["cu_seqlens"])
    loss = nn.functional.cross_entropy(logits, inputs["labels"], ignore_index=-100)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""transformers gpt_oss eager_attention_forward - rows of left padding are -inf everywhere, and the learned sink keeps the softmax finite.

Each head has a sink logit that is appended to the scores and dropped after the softmax. A query of the padding sees no key at all; its row is
(-inf, ..., -inf, sink), the maximum is the sink, the probabilities of the keys are 0 and the gradients are 0.
Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/gpt_oss/modeling_gpt_oss.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class SinkAttention(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o_proj = nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.randn(heads) * 0.1)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        attn_weights = q @ k.transpose(-1, -2) / self.head_dim**0.5 + mask
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)
        combined_logits = torch.cat([attn_weights, sinks], dim=-1)
        combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
        probs = F.softmax(combined_logits, dim=-1)
        scores = probs[..., :-1]
        return self.o_proj((scores @ v).transpose(1, 2).reshape(b, t, d))


class Model(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.self_attn = SinkAttention(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, mask):
        h = self.embed_tokens(ids)
        h = h + self.self_attn(self.norm(h), mask)
        return self.lm_head(h)


def make_mask(attention_mask):
    t = attention_mask.shape[1]
    allowed = torch.ones(t, t, dtype=torch.bool).tril() & attention_mask[:, None, None, :].bool()
    return torch.zeros(attention_mask.shape[0], 1, t, t).masked_fill(~allowed, float("-inf"))


def build():
    torch.manual_seed(22)
    model = Model()
    ids = torch.randint(1, 30, (2, 8))
    attention_mask = torch.ones(2, 8, dtype=torch.long)
    attention_mask[1, :3] = 0
    labels = ids.clone()
    labels[attention_mask == 0] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, ids=ids, mask=make_mask(attention_mask), labels=labels, optimizer=optimizer)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids, s.mask)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), s.labels[:, 1:].flatten(), ignore_index=-100)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

"""Megatron-LM: QK clipping rescales every head of a layer once one head passes the threshold.

After each optimizer step the query and key rows of a head are multiplied by eta ** alpha and eta ** (1 - alpha), with
eta = min(threshold / max_attn_logit, 1). A head whose largest attention logit is negative gets a negative eta, and the fractional
power of it is NaN: loss and gradients are finite, the weights of the head are not. Flooring the denominator at the threshold heals
it (heads below it keep a scale of one); a finite-loss or finite-gradient gate before the step, or gradient clipping, changes nothing.

Source: https://github.com/NVIDIA/Megatron-LM/pull/7517 (also https://github.com/NVIDIA/Megatron-LM/pull/7382)
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("sqrt_negative",),
    op=("pow",),
    index=(2,),
    masked=None,
    role=("weights", "optimizer"),
    fix=("clamp_denominator", "mask_before_op", "clamp_input"),
    variable=("q_scale",),
    line=("q_scale = torch.pow(eta, self.qk_clip_alpha)",),
)


class SelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, qk_clip_threshold=20.0, qk_clip_alpha=0.5):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.qk_clip_threshold = qk_clip_threshold
        self.qk_clip_alpha = qk_clip_alpha
        self.linear_q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.linear_k = nn.Linear(hidden_size, hidden_size, bias=False)
        self.linear_v = nn.Linear(hidden_size, hidden_size, bias=False)
        self.linear_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.current_max_attn_logits = None

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (
            lin(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2) for lin in (self.linear_q, self.linear_k, self.linear_v)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        self.current_max_attn_logits = scores.detach().amax(dim=(0, 2, 3))
        context = F.softmax(scores, dim=-1) @ v
        return self.linear_proj(context.transpose(1, 2).reshape(b, s, h))

    @torch.no_grad()
    def clip_qk(self):
        max_logits = self.current_max_attn_logits
        if torch.any(max_logits > self.qk_clip_threshold):
            eta = torch.clamp(self.qk_clip_threshold / max_logits, max=1.0)
            q_scale = torch.pow(eta, self.qk_clip_alpha)
            k_scale = torch.pow(eta, 1 - self.qk_clip_alpha)
            self.linear_q.weight.view(self.num_heads, self.head_dim, -1).mul_(q_scale[:, None, None])
            self.linear_k.weight.view(self.num_heads, self.head_dim, -1).mul_(k_scale[:, None, None])
        self.current_max_attn_logits = None


class TransformerLayer(nn.Module):
    def __init__(self, vocab=24, hidden_size=16, num_heads=4):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden_size)
        self.self_attention = SelfAttention(hidden_size, num_heads)
        self.output_layer = nn.Linear(hidden_size, vocab, bias=False)

    def forward(self, tokens):
        h = self.word_embeddings(tokens)
        return self.output_layer(h + self.self_attention(h))


def build():
    torch.manual_seed(7517)
    model = TransformerLayer()
    attn = model.self_attention
    with torch.no_grad():
        model.word_embeddings.weight.mul_(0.2).add_(1.0)  # the tokens share a strong common direction
        q = attn.linear_q.weight.view(4, 4, 16)
        k = attn.linear_k.weight.view(4, 4, 16)
        q[0].add_(0.6)
        k[0].add_(0.6)  # a head that has grown past the threshold
        q[2].add_(0.1)
        k[2].copy_(-q[2])  # a head that pushes every key away
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 24, (3, 9))
    return SimpleNamespace(model=model, optimizer=optimizer, tokens=tokens)


def run(s=None):
    s = s or build()
    logits = s.model(s.tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.tokens[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.model.self_attention.clip_qk()
    return loss

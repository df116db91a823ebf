"""Llama-3 RoPE scaling with high_freq_factor == low_freq_factor: the smooth factor is x / 0, and nothing takes it.

With equal factors there is no medium band: every wavelength is either above the long or below the short limit. smooth_factor is +-inf and the
blended frequencies are inf or NaN, but the where for the medium band is false everywhere and the table has no gradient.
Loss, gradients and weights are finite and right.
Source: https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py (_compute_llama3_parameters).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def compute_llama3_parameters(config):
    dim = config.head_dim
    inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2).float() / dim))
    low_freq_factor, high_freq_factor = torch.tensor(config.low_freq_factor), torch.tensor(config.high_freq_factor)
    low_freq_wavelen = config.original_max_position_embeddings / low_freq_factor
    high_freq_wavelen = config.original_max_position_embeddings / high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    inv_freq_llama = torch.where(wavelen > low_freq_wavelen, inv_freq / config.factor, inv_freq)
    smooth_factor = (config.original_max_position_embeddings / wavelen - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smoothed_inv_freq = (1 - smooth_factor) * inv_freq_llama / config.factor + smooth_factor * inv_freq_llama
    is_medium_freq = ~(wavelen < high_freq_wavelen) * ~(wavelen > low_freq_wavelen)
    return torch.where(is_medium_freq, smoothed_inv_freq, inv_freq_llama)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden = config.num_heads * config.head_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def forward(self, input_ids):
        b, t = input_ids.shape
        inv_freq = compute_llama3_parameters(self.config)
        freqs = torch.arange(t).float()[:, None] * inv_freq[None, :]
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos(), emb.sin()
        x = self.embed_tokens(input_ids)
        q, k, v = (y.view(b, t, self.config.num_heads, -1).transpose(1, 2) for y in self.qkv_proj(x).chunk(3, dim=-1))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.lm_head(x + self.o_proj(out.transpose(1, 2).reshape(b, t, -1)))


def build():
    torch.manual_seed(31)
    config = SimpleNamespace(
        vocab_size=30,
        num_heads=2,
        head_dim=16,
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=4.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    model = Attention(config)
    input_ids = torch.randint(0, 30, (2, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.input_ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

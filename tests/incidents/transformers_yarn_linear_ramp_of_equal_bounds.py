"""YaRN rotary embedding of a tiny test model - both ends of the linear ramp fall on dimension 0, and (i - min) / (max - min) is 0 / 0 there.

With original_max_position_embeddings = 4 no frequency makes a whole turn in the old context: both correction dimensions are cut to 0. The later
dimensions give inf, which the clamp to 0..1 mends; the first gives NaN, which it keeps; the rotation of the first pair, the scores and the loss are NaN.
Source: https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py (linear_ramp_factor, whose "Prevent
singularity" guard this copy has lost)
Heals: max += 0.001 where the two are equal, or a sane original context in the config. Does not: the clamp of the ramp, another rope_theta.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div", "truediv"),
    index=(0,),
    masked=None,
    role=("hidden", "attention"),
    fix=("clamp_denominator", "validate_config", "avoid_singular_op", "representable_eps", "fix_upstream", "where_on_detached"),
    variable=("linear_func",),
    line=("linear_func = (torch.arange(dim, dtype=torch.float32) - min) / (max - min)",),
)


def find_correction_dim(num_rotations, dim, base, max_position_embeddings):
    return (dim * math.log(max_position_embeddings / (num_rotations * 2 * math.pi))) / (2 * math.log(base))


def find_correction_range(low_rot, high_rot, dim, base, max_position_embeddings):
    low = math.floor(find_correction_dim(low_rot, dim, base, max_position_embeddings))
    high = math.ceil(find_correction_dim(high_rot, dim, base, max_position_embeddings))
    return max(low, 0), min(high, dim - 1)


def linear_ramp_factor(min, max, dim):
    linear_func = (torch.arange(dim, dtype=torch.float32) - min) / (max - min)
    return torch.clamp(linear_func, 0, 1)


def compute_yarn_parameters(cfg):
    dim, base, factor = cfg.head_dim, cfg.rope_theta, cfg.factor
    pos_freqs = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    inv_freq_extrapolation = 1.0 / pos_freqs
    inv_freq_interpolation = 1.0 / (factor * pos_freqs)
    low, high = find_correction_range(32, 1, dim, base, cfg.original_max_position_embeddings)
    extrapolation_factor = 1 - linear_ramp_factor(low, high, dim // 2)
    inv_freq = inv_freq_interpolation * (1 - extrapolation_factor) + inv_freq_extrapolation * extrapolation_factor
    return inv_freq, 0.1 * math.log(factor) + 1.0


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(cfg.hidden, 3 * cfg.hidden, bias=False)
        self.o_proj = nn.Linear(cfg.hidden, cfg.hidden, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, -1, self.cfg.head_dim).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        inv_freq, attention_factor = compute_yarn_parameters(self.cfg)
        freqs = torch.arange(T, dtype=torch.float32)[:, None] * inv_freq[None]
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos() * attention_factor, emb.sin() * attention_factor
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


def build():
    torch.manual_seed(60)
    cfg = SimpleNamespace(hidden=16, head_dim=8, rope_theta=10000.0, factor=4.0, original_max_position_embeddings=4, vocab=32)
    model = nn.ModuleDict(
        dict(
            embed=nn.Embedding(cfg.vocab, cfg.hidden),
            attn=Attention(cfg),
            norm=nn.RMSNorm(cfg.hidden),
            head=nn.Linear(cfg.hidden, cfg.vocab, bias=False),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.randint(0, cfg.vocab, (2, 16))
    return SimpleNamespace(model=model, optimizer=optimizer, cfg=cfg, input_ids=input_ids)


def run(s=None):
    s = s or build()
    h = s.model["embed"](s.input_ids)
    h = h + s.model["attn"](h)
    logits = s.model["head"](s.model["norm"](h))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), s.input_ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

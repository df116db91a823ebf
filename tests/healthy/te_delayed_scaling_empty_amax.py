"""Healthy: FP8 delayed scaling whose amax history holds a zero (an expert that got no token) and an inf (an overflowing step).

The scale update divides fp8_max by the amax of every tensor at once, so the new scales hold an inf (448 / 0) and a 0 (448 / inf) for a moment; two wheres
put the previous scale in their places, and all of this happens under no_grad. The quantised matmul sees finite scales only and trains normally.
Source: `_default_sf_compute` of https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/quantization.py.  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

FP8_MAX = 448.0


@torch.no_grad()
def default_sf_compute(amax, scale, fp8_max=FP8_MAX, margin=0):
    sf = (fp8_max / amax) / (2**margin)
    sf = torch.where(amax > 0.0, sf, scale)
    sf = torch.where(torch.isfinite(amax), sf, scale)
    sf = torch.where(torch.isinf(sf), torch.full_like(sf, torch.finfo(torch.float32).max), sf)
    scale.copy_(sf)
    return scale


class FakeFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Fp8Experts(nn.Module):
    def __init__(self, hidden=8, n_experts=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_experts, hidden, hidden) * 0.3)
        self.register_buffer("scale", torch.ones(n_experts))
        self.register_buffer("amax_history", torch.zeros(4, n_experts))

    def forward(self, x, expert_of_token):
        with torch.no_grad():
            default_sf_compute(self.amax_history.max(dim=0).values, self.scale)
            self.amax_history.copy_(self.amax_history.roll(-1, 0))
            self.amax_history[0].zero_()
        out = torch.zeros_like(x)
        for e in range(self.weight.shape[0]):
            rows = expert_of_token == e
            if rows.any():
                xe = x[rows]
                self.amax_history[0, e] = xe.detach().abs().max()
                out[rows] = FakeFp8.apply(xe, self.scale[e]) @ self.weight[e]
        return out


class Policy(nn.Module):
    def __init__(self, vocab=12, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.experts = Fp8Experts(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        return self.lm_head(x + self.experts(x, ids.flatten() % 2))  # expert 2 never gets a token


def build():
    torch.manual_seed(5)
    model = Policy()
    model.experts.amax_history[1] = torch.tensor([2.0, float("inf"), 0.0])  # resumed after a step that overflowed in expert 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": torch.randint(0, 12, (3, 7))})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(4):
        ids = s.batch["input_ids"]
        loss = F.cross_entropy(s.model(ids[:, :-1]), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

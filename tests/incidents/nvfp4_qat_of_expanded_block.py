"""NVFP4 quantisation-aware post-training of a model with an added block (LLaMA-Pro block expansion): o_proj of the new block is exactly zero.

NVFP4 has two scales: one float32 number per tensor, 6 * 448 / amax, and one e4m3 number per 16 weights. The per-block scale is protected by
clip(1e-12), the one of the tensor is not: the new block starts as the identity, its output projection is zero, amax is 0 and the global scale is
inf. Block amax times global scale is then 0 * inf = NaN, and so is the whole dequantised matrix.
Source: https://github.com/pytorch/ao/blob/main/torchao/prototype/mx_formats/nvfp4_tensor.py (two-level scales; the shape of the functions follows the
pure torch version quant_nvfp4_torch / dequant_nvfp4_torch / NVFP4QuantizeSTE that circulates with ComfyUI-like code bases).
Heals: a floor under amax, or a where (nothing here is differentiated). Does not: the clip of the block scale (it is there), upcasting the weight (the scale is float32 already), gradient clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("reciprocal", "div", "mul"),
    index=(),
    masked=False,
    role=("hidden", "weights"),
    fix=("clamp_denominator", "where_on_detached", "avoid_singular_op"),
    variable=("global_scale", None),
    line=("global_scale = FP4_AMAX * FP8_AMAX / x_blocks.abs().amax()",),
)

FP4_AMAX, FP8_AMAX = 6.0, 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def round_e2m1(x):
    mids = (E2M1[1:] + E2M1[:-1]) / 2
    return torch.sign(x) * E2M1[torch.bucketize(x.abs(), mids)]


def simulate_nvfp4(w):
    x_blocks = w.unflatten(-1, (-1, 16)).float()
    global_scale = FP4_AMAX * FP8_AMAX / x_blocks.abs().amax()
    s_decb = x_blocks.abs().amax(dim=-1) / FP4_AMAX
    xs = (s_decb * global_scale).clamp(-FP8_AMAX, FP8_AMAX).to(torch.float8_e4m3fn).float()
    s_encb = (global_scale / xs.clip(1e-12)).unsqueeze(-1)
    xq = round_e2m1(x_blocks * s_encb)
    return (xq * (xs / global_scale).unsqueeze(-1)).flatten(-2).to(w.dtype)


class NVFP4QuantizeSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return simulate_nvfp4(w)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class NVFP4Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, NVFP4QuantizeSTE.apply(self.weight), self.bias)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = NVFP4Linear(dim, 2 * dim, bias=False)
        self.o_proj = NVFP4Linear(2 * dim, dim, bias=False)

    def forward(self, h):
        return h + self.o_proj(F.silu(self.up(self.norm(h))))


class Policy(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def build():
    torch.manual_seed(2)
    model = Policy()
    nn.init.zeros_(model.blocks[2].o_proj.weight)  # the added block starts as the identity
    batch = dict(ids=torch.randint(0, 40, (4, 10)), advantages=torch.tensor([1.0, -0.5, 0.3, -0.8]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        ids = s.batch["ids"]
        logp = F.log_softmax(s.model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(logp * s.batch["advantages"][:, None]).mean()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

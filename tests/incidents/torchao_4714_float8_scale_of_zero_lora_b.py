"""Float8 quantisation-aware LoRA: lora_B starts at zero, its row scale is 0, and 0 / 0 goes into the float8 cast.

The fake quantiser is an autograd.Function with a straight-through backward.  It takes the scale of each row from its absolute maximum and puts no
floor under it.  For the base weight that never matters; for lora_B, all zeros by initialisation, every row is 0 / 0 at step 0.

Source: https://github.com/pytorch/ao/pull/4714 (issue 4713, Float8Tensor.from_hp of an all-zero tensor)
Heals: a floor under amax (or the scale) before the division, a scale of 1 for rows of zeros.
Does not: a larger float8 type (e5m2), quantising in float32 rather than bfloat16, a smaller alpha.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator",),
    variable=("scaled",),
    line=("scaled = hp_tensor.float() / scale",),
)

FLOAT8 = torch.float8_e4m3fn


def choose_scale_float8(hp_tensor):
    amax = hp_tensor.abs().amax(dim=-1, keepdim=True).float()
    return amax / torch.finfo(FLOAT8).max


class Float8FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hp_tensor):
        scale = choose_scale_float8(hp_tensor)
        scaled = hp_tensor.float() / scale
        qdata = scaled.to(FLOAT8)
        return (qdata.float() * scale).to(hp_tensor.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class QATLoRALinear(nn.Module):
    def __init__(self, in_features, out_features, rank=4, alpha=8.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features, dtype=torch.bfloat16) * 0.1, requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(rank, in_features, dtype=torch.bfloat16) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank, dtype=torch.bfloat16))
        self.scaling = alpha / rank

    def forward(self, x):
        weight = Float8FakeQuantize.apply(self.weight)
        lora_A = Float8FakeQuantize.apply(self.lora_A)
        lora_B = Float8FakeQuantize.apply(self.lora_B)
        return F.linear(x, weight) + F.linear(F.linear(x, lora_A), lora_B) * self.scaling


class FeedForward(nn.Module):
    def __init__(self, dim=16, hidden=24):
        super().__init__()
        self.gate_proj = QATLoRALinear(dim, hidden)
        self.down_proj = QATLoRALinear(hidden, dim)

    def forward(self, x):
        return x + self.down_proj(F.silu(self.gate_proj(x)))


def build():
    torch.manual_seed(4714)
    model = FeedForward()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = dict(x=torch.randn(6, 16, dtype=torch.bfloat16), y=torch.randn(6, 16))
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = F.mse_loss(s.model(s.batch["x"]).float(), s.batch["y"])
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

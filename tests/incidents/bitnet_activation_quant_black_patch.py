"""BitNet b1.58, activation_quant - a token of zeros in float16 gets an infinite quantisation scale.

Each token is scaled by 127 over its largest magnitude, which is clamped at 1e-5. For a token of zeros (a black border patch behind a
projection without bias) the quotient is 1.3e7: fine in float32, inf in float16. The scale times the zeros of the token is NaN, the
straight-through sum passes it on, the mean over the patches ruins the image and the step.

Source: https://github.com/wx02shi/bitnet/blob/main/mistral/quant_utils.py, after the code of the unilm BitNet FAQ.
Heals: the scale in float32, or a floor of the magnitude that fits half (1e-2). Does not heal: an eps in RMSNorm, clamping the rounded
values (NaN stays NaN), a floor of 1e-4.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow", "eps_underflow"),
    op=("reciprocal", "div", "rdiv", "__rtruediv__"),
    index=(1, 6, 0),
    masked=None,
    role=("hidden",),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator"),
    variable=("scale", None),
    line=("scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=eps)",),
)


def rms_norm(x, eps=1e-5):
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)).type_as(x)


def activation_quant(x, eps=1e-5):
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=eps)
    y = (x * scale).round().clamp_(-128, 127) / scale
    return y


def weight_quant(w, eps=1e-5):
    gamma = w.abs().mean().clamp_(min=eps)
    return (w / gamma).round().clamp_(-1, 1) * gamma


class BitLinear(nn.Linear):
    def forward(self, x):
        w = self.weight
        x_norm = rms_norm(x)
        x_quant = x_norm + (activation_quant(x_norm) - x_norm).detach()
        w_quant = w + (weight_quant(w) - w).detach()
        return F.linear(x_quant, w_quant)


class BitViT(nn.Module):
    """Patches, one BitNet feed-forward, mean over the patches."""

    def __init__(self, patch=4, dim=16, classes=5):
        super().__init__()
        self.patch = patch
        self.patch_embed = nn.Linear(patch * patch, dim, bias=False)
        self.up = BitLinear(dim, 32, bias=False)
        self.down = BitLinear(32, dim, bias=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        x = self.patch_embed(patches.reshape(images.size(0), -1, self.patch**2))
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x.mean(1))


def build():
    torch.manual_seed(158)
    images = torch.rand(3, 12, 12)
    images[1, 8:, :4] = 0.0  # a letterboxed corner
    model = BitViT().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, images=images.half(), labels=torch.tensor([0, 3, 1]))


def run(s=None):
    s = s or build()
    logits = s.model(s.images)
    loss = F.cross_entropy(logits.float(), s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

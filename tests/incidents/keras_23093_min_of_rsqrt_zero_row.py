"""keras #23093 (fixes #23075) - L2 normalisation as x * minimum(rsqrt(sum x^2), 1 / epsilon). An empty caption pools to a vector of zeros:
rsqrt gives inf, minimum takes 1 / epsilon, the loss is finite, and the backward of rsqrt computes 0 * inf.

https://github.com/keras-team/keras/pull/23093
Bounding the sum of squares before the rsqrt heals. A larger epsilon, or nan_to_num on the normalised row, does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "sqrt_zero_grad", "zero_denominator"),
    op=("rsqrt",),
    index=(2, 0),
    masked=True,
    role=("hidden",),
    fix=(
        "clamp_denominator",
        "clamp_input",
        "mask_before_op",
        "stable_function",
        "avoid_singular_op",
        "representable_eps",
        "drop_invalid_sample",
        "guard_empty",
        "fix_upstream",
        "where_on_detached",
    ),
    variable=("inv_norm",),
    line=("inv_norm = torch.rsqrt(square_sum)",),
)

PAD = 0


def normalize(x, epsilon=1e-12):
    square_sum = torch.sum(torch.square(x), dim=-1, keepdim=True)
    inv_norm = torch.rsqrt(square_sum)
    scale = torch.minimum(inv_norm, torch.full_like(inv_norm, 1.0 / epsilon))
    return x * scale


class CaptionTower(nn.Module):
    def __init__(self, vocab=20, width=8, dim=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=PAD)
        self.proj = nn.Linear(width, dim, bias=False)

    def forward(self, ids):
        keep = (ids != PAD).float()
        pooled = self.embed(ids).sum(1) / keep.sum(1, keepdim=True).clamp(min=1.0)
        return self.proj(pooled)


def build():
    torch.manual_seed(2309)
    tower = CaptionTower()
    optimizer = torch.optim.AdamW(tower.parameters(), lr=1e-3)
    ids = torch.tensor([[4, 7, 9, 0], [3, 11, 0, 0], [0, 0, 0, 0], [15, 2, 6, 18]])  # the third image has no caption
    return SimpleNamespace(model=tower, optimizer=optimizer, ids=ids, images=F.normalize(torch.randn(4, 6), dim=-1), logit_scale=10.0)


def run(s=None):
    s = s or build()
    text = normalize(s.model(s.ids))
    logits = s.logit_scale * text @ s.images.T
    target = torch.arange(len(logits))
    loss = 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

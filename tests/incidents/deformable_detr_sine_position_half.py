"""Deformable DETR: normalised sine position embedding, in half precision, over an image with padded rows.

PositionEmbeddingSine divides (x_embed - 0.5) by the last count of the row plus 1e-6. A row that is padding has no valid column, so the quotient is
-0.5 / 1e-6: harmless in fp32 (the sine of a large number), but -inf in fp16, and the sine of it is NaN. The loss picks the valid cells only
and is finite; the weight gradients are 0 * NaN. Computing the embedding in fp32 or a floor of one under the count heals it; a selection of the
valid cells before the loss (it is there already) or nan_to_num on the logits does not.

Source: https://github.com/fundamentalvision/Deformable-DETR/blob/main/models/position_encoding.py (fault: fp16 model, padded rows)
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow", "zero_denominator"),
    op=("div",),
    index=(1, 5, 0),
    masked=True,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_denominator", "mask_before_op"),
    variable=("x_embed", None),
    line=("x_embed = (x_embed - 0.5) / (x_embed[:, :, -1:] + eps) * self.scale",),
)


class PositionEmbeddingSine(nn.Module):
    def __init__(self, num_pos_feats=8, temperature=10000, dtype=torch.float32):
        super().__init__()
        self.num_pos_feats = num_pos_feats
        self.temperature = temperature
        self.scale = 2 * math.pi
        self.dtype = dtype

    def forward(self, mask):
        not_mask = ~mask
        y_embed = not_mask.cumsum(1, dtype=self.dtype)
        x_embed = not_mask.cumsum(2, dtype=self.dtype)
        eps = 1e-6
        y_embed = (y_embed - 0.5) / (y_embed[:, -1:, :] + eps) * self.scale
        x_embed = (x_embed - 0.5) / (x_embed[:, :, -1:] + eps) * self.scale

        dim_t = torch.arange(self.num_pos_feats, dtype=torch.float32)
        dim_t = (self.temperature ** (2 * (dim_t // 2) / self.num_pos_feats)).to(self.dtype)
        pos_x = x_embed[..., None] / dim_t
        pos_y = y_embed[..., None] / dim_t
        pos_x = torch.stack((pos_x[..., 0::2].sin(), pos_x[..., 1::2].cos()), dim=4).flatten(3)
        pos_y = torch.stack((pos_y[..., 0::2].sin(), pos_y[..., 1::2].cos()), dim=4).flatten(3)
        return torch.cat((pos_y, pos_x), dim=3)


class DenseHead(nn.Module):
    def __init__(self, channels=6, dim=16, classes=5, dtype=torch.half):
        super().__init__()
        self.input_proj = nn.Linear(channels, dim)
        self.position = PositionEmbeddingSine(dim // 2, dtype=dtype)
        self.linear1 = nn.Linear(dim, 2 * dim)
        self.linear2 = nn.Linear(2 * dim, dim)
        self.class_embed = nn.Linear(dim, classes)
        self.to(dtype)

    def forward(self, feature, mask):
        src = self.input_proj(feature)
        hidden = src + self.position(mask)
        hidden = hidden + self.linear2(F.relu(self.linear1(hidden)))
        return self.class_embed(hidden)


def nested_tensor(images):
    """Pads images of different sizes to the largest one; the mask is True on padding."""
    h = max(im.shape[0] for im in images)
    w = max(im.shape[1] for im in images)
    batch = torch.zeros(len(images), h, w, images[0].shape[2])
    mask = torch.ones(len(images), h, w, dtype=torch.bool)
    for i, im in enumerate(images):
        batch[i, : im.shape[0], : im.shape[1]] = im
        mask[i, : im.shape[0], : im.shape[1]] = False
    return batch, mask


def build():
    torch.manual_seed(11)
    model = DenseHead()
    feature, mask = nested_tensor([torch.randn(7, 6, 6), torch.randn(5, 6, 6)])
    labels = torch.randint(0, 5, (2, 7, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return SimpleNamespace(model=model, optimizer=optimizer, feature=feature.half(), mask=mask, labels=labels)


def run(s=None):
    s = s or build()
    logits = s.model(s.feature, s.mask)
    valid = ~s.mask
    loss = F.cross_entropy(logits[valid].float(), s.labels[valid])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""BEiT - fix_init_weight rescales the residual projections by sqrt(2 * layer_id), counted from 0.

The rescaling is written for layers that count from 1. Called with enumerate's own number it divides the projections of the first block by
sqrt(0); an in-place division of a tensor by 0.0 raises nothing, so the block starts with weights of +-inf and the first forward is NaN.
Source: https://github.com/microsoft/unilm/blob/master/beit/modeling_finetune.py and timm/models/beit.py (fix_init_weight, rescale(…,
layer_id + 1)); the forgotten + 1 is the fault that was planted.
Heals: layer_id + 1. Does not: gradient clipping, a smaller learning rate, a layer scale of 0 (0 * inf).
"""

from types import SimpleNamespace
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("zero_denominator", "poisoned_weights"),
    op=("any",),
    index=None,
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "initialise_memory", "validate_config", "clamp_denominator"),
    variable=("blocks.0.attn.proj.weight",),
    line=("return self.proj(x)", "param.div_(math.sqrt(2.0 * layer_id))", None),
)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1) * (c // self.num_heads) ** -0.5).softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, num_heads, mlp_ratio=2):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, dim * mlp_ratio)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Beit(nn.Module):
    def __init__(self, patch_dim=12, num_patches=9, dim=16, depth=3, num_heads=2, num_classes=5):
        super().__init__()
        self.patch_embed = nn.Linear(patch_dim, dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, dim))
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(depth))
        self.fc_norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.apply(self._init_weights)
        self.fix_init_weight()

    def _init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            nn.init.zeros_(m.bias)

    def fix_init_weight(self):
        def rescale(param, layer_id):
            param.div_(math.sqrt(2.0 * layer_id))

        for layer_id, layer in enumerate(self.blocks):
            rescale(layer.attn.proj.weight.data, layer_id)
            rescale(layer.mlp.fc2.weight.data, layer_id)

    def forward(self, patches):
        x = self.patch_embed(patches) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.fc_norm(x.mean(dim=1)))


def build():
    torch.manual_seed(33)
    model = Beit()
    patches = torch.randn(4, 9, 12)
    labels = torch.randint(0, 5, (4,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    return SimpleNamespace(model=model, optimizer=optimizer, patches=patches, labels=labels)


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.patches), s.labels, label_smoothing=0.1)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

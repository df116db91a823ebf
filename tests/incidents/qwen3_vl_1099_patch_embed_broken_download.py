"""Projector training on a frozen Qwen2.5-VL vision tower whose checkpoint shard was damaged on download.

A span of the raw bfloat16 bytes reads 0xFF, which is NaN.  The loader checks names and shapes only.  The user saw NaN after the patch embedding,
turned autocast off, tried float32, and found at last that the file was bad.

Source: https://github.com/QwenLM/Qwen3-VL/issues/1099
Heals: downloading the shard again.
Does not: float32, autocast off, a smaller lr, clamping the pixel values.
"""

import hashlib
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights",),
    op=("conv2d", "convolution"),
    index=(2, 0, 1, 2),
    masked=None,
    role=("weights",),
    fix=("fix_upstream",),
    variable=("visual.patch_embed.proj.weight",),
    line=("hidden_states = self.proj(pixel_values)",),
)

EMBED, LLM_DIM, PATCH = 12, 16, 4


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, EMBED, kernel_size=PATCH, stride=PATCH, bias=False)

    def forward(self, pixel_values):
        hidden_states = self.proj(pixel_values)
        return hidden_states.flatten(2).transpose(1, 2)


class VisionTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.norm = nn.LayerNorm(EMBED)
        self.mlp = nn.Sequential(nn.Linear(EMBED, 2 * EMBED), nn.GELU(), nn.Linear(2 * EMBED, EMBED))

    def forward(self, pixel_values):
        x = self.patch_embed(pixel_values)
        return x + self.mlp(self.norm(x))


class VLModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = VisionTower().requires_grad_(False)
        self.merger = nn.Linear(EMBED, LLM_DIM)
        self.lm_head = nn.Linear(LLM_DIM, 10)

    def forward(self, pixel_values):
        return self.lm_head(torch.tanh(self.merger(self.visual(pixel_values))).mean(dim=1))


def fetch_shard():
    """name -> (shape, raw little-endian bfloat16 bytes) as the download left them."""
    shard = {}
    for name, tensor in VLModel().state_dict().items():
        raw = bytearray(tensor.to(torch.bfloat16).contiguous().view(torch.uint8).flatten().tolist())
        shard[name] = (tuple(tensor.shape), raw)
    raw = shard["visual.patch_embed.proj.weight"][1]
    raw[204:236] = b"\xff" * 32
    return shard


def load_shard(model, shard):
    state = {name: torch.frombuffer(raw, dtype=torch.bfloat16).view(shape).float() for name, (shape, raw) in shard.items()}
    model.load_state_dict(state, strict=True)
    return hashlib.md5(b"".join(bytes(raw) for _, raw in shard.values())).hexdigest()


def build():
    torch.manual_seed(1099)
    model = VLModel()
    load_shard(model, fetch_shard())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = dict(pixel_values=torch.randn(2, 3, 8, 8), labels=torch.tensor([1, 4]))
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = F.cross_entropy(s.model(s.batch["pixel_values"]), s.batch["labels"])
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

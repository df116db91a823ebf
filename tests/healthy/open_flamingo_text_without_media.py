"""OpenFlamingo masked cross attention with -inf as fill - rows of text without media are NaN after the softmax and look fatal.

The next line sets exactly these rows to 0, so nothing that follows sees the NaN. In the backward pass the softmax does give NaN for them, but every
element of such a row was filled by the first masked_fill, whose backward sets its gradient to 0. Loss, gradients and weights are right. Healthy.
Source: https://github.com/mlfoundations/open_flamingo/blob/main/open_flamingo/src/helpers.py (MaskedCrossAttention)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class MaskedCrossAttention(nn.Module):
    def __init__(self, dim, dim_visual, heads=2, dim_head=4):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        inner = heads * dim_head
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim_visual, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, media, media_locations):
        T_img, n = media.shape[1:3]
        q = self.split(self.to_q(self.norm(x))) * self.scale
        k, v = (self.split(t) for t in self.to_kv(media.flatten(1, 2)).chunk(2, dim=-1))
        sim = q @ k.transpose(-1, -2)

        text_time = media_locations.cumsum(dim=-1)
        media_time = torch.arange(T_img) + 1
        text_to_media_mask = text_time[:, None, :, None] == media_time.repeat_interleave(n)
        sim = sim.masked_fill(~text_to_media_mask, float("-inf"))
        attn = sim.softmax(dim=-1)

        text_without_media_mask = (text_time == 0)[:, None, :, None]
        attn = attn.masked_fill(text_without_media_mask, 0.0)
        return self.to_out((attn @ v).transpose(1, 2).flatten(2))


class GatedCrossAttentionBlock(nn.Module):
    def __init__(self, dim, dim_visual):
        super().__init__()
        self.attn = MaskedCrossAttention(dim, dim_visual)
        self.attn_gate = nn.Parameter(torch.tensor([0.1]))
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim * 2), nn.GELU(), nn.Linear(dim * 2, dim))
        self.ff_gate = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x, media, media_locations):
        x = x + self.attn(x, media, media_locations) * self.attn_gate.tanh()
        return x + self.ff(x) * self.ff_gate.tanh()


class Flamingo(nn.Module):
    def __init__(self, vocab=24, dim=8, dim_visual=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = GatedCrossAttentionBlock(dim, dim_visual)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, media, media_locations):
        return self.lm_head(self.block(self.embed(ids), media, media_locations))


def build():
    torch.manual_seed(242)
    model = Flamingo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lang_x = torch.randint(0, 23, (2, 7))
    lang_x[0, [0, 4]] = 23
    lang_x[1, [2, 5]] = 23  # "Here is a picture: <image> ..."
    vision_x = torch.randn(2, 2, 3, 6)
    return SimpleNamespace(model=model, optimizer=optimizer, lang_x=lang_x, vision_x=vision_x, media_token_id=23)


def run(s=None):
    s = s or build()
    labels = s.lang_x.masked_fill(s.lang_x == s.media_token_id, -100)
    logits = s.model(s.lang_x, s.vision_x, s.lang_x == s.media_token_id)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""SFT of a two-layer decoder with sliding-window attention and left padding (Gemma-2 form, eager softmax).

The padding mask and the sliding window are both written as -inf and added. A query that stands on left padding sees only padding: its whole row is -inf, the softmax
of it is NaN. The labels of those positions are -100, but the next layer reads them as keys and values, and NaN + (-inf) is NaN: every token is lost.
Source: https://github.com/huggingface/transformers/issues/32390
Heals: a finite minimum instead of -inf, a softmax that is safe for rows without a key.  Does not: labels of -100 (there already), another window, zeroing the NaN rows
after the softmax (the loss is finite then, but its backward still multiplies by them).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax",),
    op=("softmax",),
    index=(1, 0, 0, 0),
    masked=True,
    role=("attention",),
    fix=("finite_mask_fill", "safe_softmax", "clamp_input"),
    variable=("attn_weights",),
    line=("attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32)",),
)


def prepare_mask(attention_mask, window):
    b, t = attention_mask.shape
    pos = torch.arange(t)
    distance = pos[:, None] - pos[None, :]
    visible = (distance >= 0) & (distance < window)
    mask = torch.zeros(b, 1, t, t)
    mask = mask.masked_fill(~visible, float("-inf"))
    return mask.masked_fill(~attention_mask.bool()[:, None, None, :], float("-inf"))


class Attention(nn.Module):
    def __init__(self, dim, heads, softcap=50.0):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.heads, self.softcap = heads, softcap

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attn_weights = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        attn_weights = torch.tanh(attn_weights / self.softcap) * self.softcap
        attn_weights = attn_weights + mask
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32)
        return self.o_proj((attn_weights @ v).transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Attention(dim, 2) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(3))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, attention_mask):
        mask = prepare_mask(attention_mask, window=4)
        h = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers):
            h = h + layer(norm(h), mask)
        return self.lm_head(self.norms[-1](h))


def build():
    torch.manual_seed(1)
    model = Decoder()
    ids = torch.randint(1, 32, (2, 8))
    attention_mask = torch.ones(2, 8, dtype=torch.long)
    attention_mask[1, :3] = 0
    ids[1, :3] = 0
    labels = ids.masked_fill(attention_mask == 0, -100)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch={"input_ids": ids, "attention_mask": attention_mask, "labels": labels},
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        logits = s.model(s.batch["input_ids"], s.batch["attention_mask"])
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 32), s.batch["labels"][:, 1:].reshape(-1), ignore_index=-100)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

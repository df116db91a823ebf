"""Causal mask and padding mask, both of finfo.min, added to each other for a left-padded batch (transformers' AttentionMaskConverter before its fix).  Healthy.

finfo.min + finfo.min overflows to -inf on every future padding key. No row is all -inf: a query on padding still has finfo.min on itself, the softmax of its row is
finite (and meaningless), its label is -100. Loss, gradients and weights are right.
Source: https://github.com/huggingface/transformers/pull/27114
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def to_4d(attention_mask, dtype):
    b, t = attention_mask.shape
    causal = torch.full((t, t), torch.finfo(dtype).min, dtype=dtype).triu(1)
    padding = (1.0 - attention_mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min
    return causal[None, None] + padding


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        return x + self.out((scores.softmax(-1) @ v).squeeze(1))


class Model(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, attention_mask):
        h = self.embed(ids)
        mask = to_4d(attention_mask, h.dtype)
        for layer in self.layers:
            h = layer(h, mask)
        return self.head(h)


def build():
    torch.manual_seed(11)
    model = Model()
    ids = torch.randint(1, 30, (2, 9))
    attention_mask = torch.ones(2, 9)
    attention_mask[0, :4] = 0
    labels = ids.masked_fill(attention_mask == 0, -100)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch={"input_ids": ids, "attention_mask": attention_mask, "labels": labels},
    )


def run(s=None):
    s = s or build()
    for _ in range(3):
        logits = s.model(s.batch["input_ids"], s.batch["attention_mask"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), s.batch["labels"][:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

"""The LayerNorm of the Annotated Transformer divides by std + eps, and padded positions are rows of zeros whose std is 0. It looks like the
gradient of a square root at 0; it is healthy: torch gives std at 0 a gradient of 0, eps keeps the quotient finite, padding is not scored.

https://github.com/harvardnlp/annotated-transformer/blob/master/the_annotated_transformer.py (LayerNorm)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD = 0


class LayerNorm(nn.Module):
    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class Encoder(nn.Module):
    def __init__(self, vocab=15, d_model=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model, padding_idx=PAD)
        self.norm = LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, 2, batch_first=True)
        self.out = nn.Linear(d_model, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        h = self.norm(x)
        y, _ = self.attn(h, h, h, key_padding_mask=ids == PAD, need_weights=False)
        return self.out(x + y)


def build():
    torch.manual_seed(17)
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    ids = torch.tensor([[5, 3, 8, 11, 2, 0, 0], [4, 9, 2, 0, 0, 0, 0], [7, 7, 1, 13, 6, 12, 2]])
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), s.ids[:, 1:].flatten(), ignore_index=PAD)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

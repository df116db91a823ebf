"""Encoder feed-forward trained in half precision: one output of the down projection passes 65504 and the next norm turns it into NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("mm", "linear", "matmul", "addmm"),
    index=(3, 5),
    masked=False,
    role=("hidden",),
    fix=("upcast_fp32",),
    variable=("y",),
    line=("y = self.wo(y)",),
)


class ScaleNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.gain * wide.to(self.gain.dtype)


class DenseRelu(nn.Module):
    def __init__(self, width=8, inner=32):
        super().__init__()
        self.wi = nn.Linear(width, inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        y = torch.relu(self.wi(x))
        y = self.wo(y)
        return y


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.pre = ScaleNorm(width)
        self.ffn = DenseRelu(width)
        self.post = ScaleNorm(width)

    def forward(self, x):
        return self.post(x + self.ffn(self.pre(x)))


class Ranker(nn.Module):
    def __init__(self, vocab=30, width=8):
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        self.block = Block(width)
        self.score = nn.Linear(width, 2, bias=False)

    def forward(self, flat_tokens):
        return self.score(self.block(self.shared(flat_tokens)))


def build():
    torch.manual_seed(5651)
    model = Ranker()
    tokens = torch.arange(2, 28, 3)
    with torch.no_grad():  # a pretrained outlier channel
        inner = torch.relu(model.block.ffn.wi(model.block.pre(model.shared(tokens))))
        model.block.ffn.wo.weight[5] = inner[3] * (71000.0 / inner[3].square().sum())
    batch = {"tokens": tokens, "labels": torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])}
    return SimpleNamespace(model=model.half(), optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    scores = s.model(s.batch["tokens"])
    loss = nn.functional.cross_entropy(scores.float(), s.batch["labels"])
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss

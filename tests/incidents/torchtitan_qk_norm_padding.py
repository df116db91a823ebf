"""L2 QK-norm takes sqrt of a zero sum of squares for padding tokens with a zero embedding, so its backward divides zero by zero."""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt", "div"),
    index=(1, 0, 5, 0),
    masked=True,
    role=("attention", "hidden"),
    fix=("avoid_singular_op", "clamp_input", "representable_eps"),
    variable=("norm",),
    line=("norm = x.square().sum(dim=-1, keepdim=True).sqrt()",),
)


def l2norm(x, eps=1e-6):
    norm = x.square().sum(dim=-1, keepdim=True).sqrt()
    return x / (norm + eps)


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(8.0)))

    def forward(self, x, mask):
        bs, seqlen, _ = x.shape
        xq, xk, xv = (w(x).view(bs, seqlen, self.n_heads, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        xq, xk = l2norm(xq), l2norm(xk)
        scores = (xq @ xk.transpose(-1, -2)) * self.log_scale.exp()
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        out = scores.softmax(dim=-1) @ xv
        return self.wo(out.transpose(1, 2).reshape(bs, seqlen, -1))


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, n_heads)
        self.w1 = nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x, mask):
        h = x + self.attention(self.attention_norm(x), mask)
        return h + self.w2(F.silu(self.w1(h)))


class Transformer(nn.Module):
    def __init__(self, vocab=20, dim=16, n_layers=2, n_heads=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim, padding_idx=0)
        self.layers = nn.ModuleList(TransformerBlock(dim, n_heads) for _ in range(n_layers))
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        seqlen = tokens.shape[1]
        causal = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
        mask = causal & (tokens != 0)[:, None, None, :]
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, mask)
        return self.output(h)


def build():
    torch.manual_seed(102)
    model = Transformer()
    input_ids = torch.randint(1, 20, (3, 8))
    input_ids[1, 5:] = 0
    input_ids[2, 7:] = 0
    advantages = torch.tensor([0.4, -0.9, 0.7])
    batch = SimpleNamespace(input_ids=input_ids, advantages=advantages)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch.input_ids
    logits = s.model(ids)[:, :-1]
    labels = ids[:, 1:]
    logprobs = -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    loss_mask = (labels != 0).float()
    loss = -(logprobs * s.batch.advantages[:, None] * loss_mask).sum() / loss_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

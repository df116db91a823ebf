"""A per-head attention temperature is learnable and one head starts at 0, so its scores are divided by 0 and the
softmax row becomes NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(0, 2, 0, 0),
    masked=False,
    role=("attention", "logits"),
    fix=("clamp_denominator", "validate_config"),
    variable=("scores",),
    line=("scores = torch.matmul(q, k.mT) / self.temperature",),
)


class ScaledHeads(nn.Module):
    def __init__(self, width=12, heads=3, temperatures=(1.7, 2.0, 0.0)):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.tensor(temperatures).view(1, heads, 1, 1))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, w // self.h).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.mT) / self.temperature
        causal = torch.ones(t, t, dtype=torch.bool).triu(1)
        attn = scores.masked_fill(causal, float("-inf")).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class Policy(nn.Module):
    def __init__(self, vocab=14):
        super().__init__()
        self.emb = nn.Embedding(vocab, 12)
        self.block = ScaledHeads()
        self.head = nn.Linear(12, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + self.block(h))


def build():
    torch.manual_seed(14)
    model = Policy()
    ids = torch.randint(0, 14, (2, 6))
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=dict(ids=ids, adv=torch.tensor([[1.0], [-0.5]]))
    )


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    lp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    loss = -(torch.exp(lp - lp.detach()) * s.batch["adv"]).mean()
    loss.backward()
    s.optimizer.step()
    return loss

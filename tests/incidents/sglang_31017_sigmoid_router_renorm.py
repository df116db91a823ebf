"""Experts are picked by sigmoid plus bias but weighted by the bare sigmoid, which underflows to 0 for every picked expert of one token."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(5, 0),
    masked=False,
    role=("router",),
    fix=("clamp_denominator", "representable_eps"),
    variable=("share",),
    line=("share = picked / picked.sum(dim=-1, keepdim=True)",),
)


class BiasedTopKRouter(nn.Module):
    def __init__(self, width, experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(experts, width) * 0.3)
        self.register_buffer("selection_bias", torch.linspace(-0.2, 0.2, experts))

    def forward(self, x):
        affinity = F.linear(x, self.weight).sigmoid()
        chosen = (affinity + self.selection_bias).topk(self.top_k, dim=-1).indices
        picked = affinity.gather(1, chosen)
        share = picked / picked.sum(dim=-1, keepdim=True)
        return chosen, share * 1.5


class SparseBlock(nn.Module):
    def __init__(self, width=8, experts=6, top_k=2):
        super().__init__()
        self.router = BiasedTopKRouter(width, experts, top_k)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        chosen, share = self.router(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel():
                out.index_add_(0, token, expert(x[token]) * share[token, slot].unsqueeze(-1))
        return x + out


class SparseLM(nn.Module):
    def __init__(self, vocab=18, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.block = SparseBlock(width)
        self.unembed = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.unembed(self.block(self.embed(tokens)))


def build():
    torch.manual_seed(31017)
    model = SparseLM()
    with torch.no_grad():
        model.block.router.weight[:, 6] = -31.0
        model.embed.weight[:, 6] = 0.01 * torch.randn(18)
        model.embed.weight[17, 6] = 4.0  # a rare control token with a strong outlier channel
    tokens = torch.randint(0, 16, (11,))
    tokens[5] = 17
    batch = {"tokens": tokens, "targets": torch.randint(0, 16, (11,)), "weights": torch.rand(11)}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    nll = F.cross_entropy(s.model(s.batch["tokens"]), s.batch["targets"], reduction="none")
    loss = torch.dot(nll, s.batch["weights"]) / s.batch["weights"].sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

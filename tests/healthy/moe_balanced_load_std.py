"""A new router sends equal load to every expert, so the load std is exactly 0; torch.std defines its gradient there as 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class TopKRouter(nn.Module):
    def __init__(self, dim, num_experts, topk):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, dim))
        self.topk = topk

    def forward(self, x):
        logits = F.linear(x, self.weight)
        probs = logits.softmax(dim=-1)
        scores, indices = probs.topk(self.topk, dim=-1)
        importance = probs.sum(dim=0)
        aux_loss = importance.std() / importance.mean()
        z_loss = torch.logsumexp(logits, dim=-1).square().mean()
        return scores / scores.sum(-1, keepdim=True), indices, aux_loss, z_loss


class MoELayer(nn.Module):
    def __init__(self, vocab=16, dim=8, num_experts=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.router = TopKRouter(dim, num_experts, topk=2)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        scores, indices, aux_loss, z_loss = self.router(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (indices == e).nonzero(as_tuple=True)
            if token.numel():
                out = out.index_add(0, token, expert(x[token]) * scores[token, slot, None])
        return self.lm_head(x + out), aux_loss, z_loss


def build():
    torch.manual_seed(116)
    model = MoELayer()
    ids = torch.randint(0, 16, (13,))
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch={"ids": ids[:-1], "labels": ids[1:]}
    )


def run(s=None):
    s = s or build()
    logits, aux_loss, z_loss = s.model(s.batch["ids"])
    loss = F.cross_entropy(logits, s.batch["labels"]) + 1e-2 * aux_loss + 1e-3 * z_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

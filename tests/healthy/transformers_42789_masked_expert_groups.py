"""Expert groups that lost the group vote are set to -inf only to choose indices; the mixing weights come from the clean scores."""

from types import SimpleNamespace

import torch
import torch.nn as nn


class GroupedRouter(nn.Module):
    def __init__(self, width=8, experts=8, groups=4, kept_groups=2, top_k=3):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.register_buffer("balance", torch.randn(experts))
        self.groups, self.kept_groups, self.top_k = groups, kept_groups, top_k

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        vote = (scores + self.balance).unflatten(1, (self.groups, -1))
        winners = vote.topk(2, dim=2)[0].sum(2).topk(self.kept_groups, dim=1)[1]
        alive = torch.zeros(len(x), self.groups, dtype=torch.bool).scatter(1, winners, True)
        candidates = vote.masked_fill(~alive.unsqueeze(2), float("-inf")).flatten(1)
        picked = candidates.topk(self.top_k, dim=1).indices
        weights = scores.gather(1, picked)
        return picked, weights / (weights.sum(1, keepdim=True) + 1e-20)


class Mixture(nn.Module):
    def __init__(self, width=8, experts=8):
        super().__init__()
        self.router = GroupedRouter(width, experts)
        self.bank = nn.Parameter(0.3 * torch.randn(experts, width, width))

    def forward(self, x):
        picked, weights = self.router(x)
        mixed = torch.einsum("nd,nkde->nke", x, self.bank[picked])
        return x + (torch.tanh(mixed) * weights.unsqueeze(2)).sum(1)


def build():
    torch.manual_seed(42789)
    model = nn.Sequential(nn.Embedding(22, 8), Mixture(), nn.Linear(8, 22))
    batch = {"tokens": torch.randint(0, 22, (15,)), "next": torch.randint(0, 22, (15,)), "adv": torch.randn(15)}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    logp = -nn.functional.cross_entropy(s.model(s.batch["tokens"]), s.batch["next"], reduction="none")
    ratio = torch.exp(logp - logp.detach())
    loss = -(ratio * s.batch["adv"]).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss

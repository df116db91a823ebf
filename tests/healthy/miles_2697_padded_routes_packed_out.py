"""Routing replay with -1 for padding tokens, where the padded rows are dropped before any expert or the head sees them.

The gate's softmax over an empty row is NaN. Those rows are left out by a boolean index; in backward they receive 0, the softmax turns that into NaN for
its own row, and masked_fill, which filled every entry of that row, sends 0 on. Gradients and weights are finite and right.

Source: https://github.com/radixark/miles/pull/2697 , https://github.com/THUDM/slime/pull/1052 (all -1 rows of replayed experts)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class ReplayMoE(nn.Module):
    def __init__(self, hidden=12, num_experts=5):
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_experts))

    def forward(self, x, top_indices, valid):
        logits = self.gate(x)
        recorded = (top_indices >= 0).to(logits.dtype)
        routing_map = torch.zeros_like(logits).scatter_add_(1, top_indices.clamp(min=0), recorded) > 0
        probs = torch.softmax(logits.masked_fill(~routing_map, float("-inf")), dim=-1)
        tokens, probs = x[valid], probs[valid]
        y = sum(probs[:, e : e + 1] * F.silu(expert(tokens)) for e, expert in enumerate(self.experts))
        return tokens + y


class Policy(nn.Module):
    def __init__(self, vocab=18, hidden=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.moe = ReplayMoE(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids, top_indices, valid):
        return self.lm_head(self.moe(self.embed(ids), top_indices, valid))


def build():
    torch.manual_seed(43)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 18, (14,))
    labels = torch.randint(0, 18, (14,))
    valid = torch.arange(14) < 11
    top_indices = torch.stack([torch.randperm(5)[:2] for _ in range(14)])
    top_indices[~valid] = -1
    advantages = torch.cat([torch.full((6,), 0.9), torch.full((8,), -0.9)])
    old_log_probs = -3.0 + 0.2 * torch.randn(14)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        ids=ids,
        labels=labels,
        valid=valid,
        top_indices=top_indices,
        advantages=advantages,
        old_log_probs=old_log_probs,
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.ids, s.top_indices, s.valid)
    log_probs = F.log_softmax(logits, -1).gather(-1, s.labels[s.valid][:, None]).squeeze(-1)
    ratio = torch.exp(log_probs - s.old_log_probs[s.valid])
    adv = s.advantages[s.valid]
    loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.28)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

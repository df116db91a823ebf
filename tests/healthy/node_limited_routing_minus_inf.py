"""Healthy: node-limited (group-limited) expert routing. Most entries of the tensor that chooses experts are -inf, one padded expert has a -inf logit.

Scores of experts outside the chosen groups are filled with -inf before top-k; the filled tensor gives indices only and the weights are gathered from
the untouched scores. One expert slot is a pad (the number of experts was rounded up): its logit is -inf, its softmax 0, and it is
never chosen. The z-loss uses logsumexp, which takes a single -inf without harm.
Source: `_get_node_limited_routing_scores` / TokenChoiceTopKRouter of https://github.com/pytorch/torchtitan (torchtitan/models/moe).  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class NodeLimitedRouter(nn.Module):
    def __init__(self, dim=8, num_experts=8, num_expert_groups=4, num_limited_groups=2, top_k=2, real_experts=7):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.num_expert_groups, self.num_limited_groups, self.top_k = num_expert_groups, num_limited_groups, top_k
        self.register_buffer("padded", torch.arange(num_experts) >= real_experts)

    def forward(self, x):
        logits = self.gate(x).masked_fill(self.padded, float("-inf"))
        z_loss = torch.logsumexp(logits, dim=-1).square().mean()
        scores = logits.softmax(dim=-1)
        grouped = scores.detach().view(x.shape[0], self.num_expert_groups, -1)
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        group_idx = group_scores.topk(self.num_limited_groups, dim=-1).indices
        group_mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, group_idx, False)
        scores_for_choice = scores.view_as(grouped).masked_fill(group_mask.unsqueeze(-1), float("-inf")).flatten(1)
        selected = scores_for_choice.topk(self.top_k, dim=-1).indices
        top_scores = scores.gather(1, selected)
        return top_scores / (top_scores.sum(-1, keepdim=True) + 1e-20), selected, z_loss


class MoePolicy(nn.Module):
    def __init__(self, vocab=12, dim=8, num_experts=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.router = NodeLimitedRouter(dim, num_experts)
        self.w = nn.Parameter(torch.randn(num_experts, dim, dim) * 0.3)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        weights, selected, z_loss = self.router(x)
        y = torch.einsum("td,tkde->tke", x, self.w[selected])
        return self.lm_head(x + (weights.unsqueeze(-1) * y).sum(1)), z_loss


def build():
    torch.manual_seed(8)
    model = MoePolicy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": torch.randint(0, 12, (3, 7))})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(4):
        ids = s.batch["input_ids"]
        logits, z_loss = s.model(ids[:, :-1])
        loss = F.cross_entropy(logits, ids[:, 1:].flatten()) + 1e-3 * z_loss
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

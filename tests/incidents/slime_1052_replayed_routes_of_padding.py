"""Rollout routing replay (R3): the experts that the inference engine chose are replayed in training; padding tokens carry -1.

The recorded indices become a routing map, every expert outside of it is filled with -inf and the gate is a softmax over the rest. A padding token
has no recorded expert: its row is all -inf, softmax makes it NaN, the token's hidden state is NaN, and the loss mask multiplies NaN by 0.

Source: https://github.com/THUDM/slime/pull/1052 , https://github.com/radixark/miles/pull/2697 (fully padded rows are -1 and must be replaced with
in-range indices before gather and dispatch)
Heals: in-range experts for padded rows, a finite fill, a softmax that gives zeros on an empty row. Does not: torch.where on the per-token loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax", "nan_times_zero_mask"),
    op=("softmax", "_softmax"),
    index=(10, 0),
    masked=True,
    role=("router",),
    fix=("safe_softmax", "finite_mask_fill", "mask_before_op", "fix_upstream", "guard_empty", "drop_invalid_sample"),
    variable=("probs",),
    line=("probs = torch.softmax(scores, dim=-1)",),
)


class ReplayRouter(nn.Module):
    def __init__(self, hidden, num_experts):
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)

    def forward(self, x, top_indices):
        logits = self.gate(x)
        routing_map = torch.zeros_like(logits).scatter_add_(1, top_indices.clamp(min=0), (top_indices >= 0).to(logits.dtype)) > 0
        scores = logits.masked_fill(~routing_map, float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        return probs


class MoEPolicy(nn.Module):
    def __init__(self, vocab=16, hidden=12, num_experts=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.router = ReplayRouter(hidden, num_experts)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_experts))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids, top_indices):
        x = self.embed(ids)
        probs = self.router(x, top_indices)
        y = sum(probs[:, e : e + 1] * F.silu(expert(x)) for e, expert in enumerate(self.experts))
        return self.lm_head(x + y)


def build():
    torch.manual_seed(8)
    model = MoEPolicy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 16, (12,))  # one packed micro batch of 10 tokens, padded to 12
    labels = torch.randint(0, 16, (12,))
    loss_mask = torch.tensor([0.0] * 3 + [1.0] * 7 + [0.0] * 2)
    top_indices = torch.stack([torch.randperm(6)[:2] for _ in range(12)])
    top_indices[10:] = -1
    advantages = torch.full((12,), 0.8)
    return SimpleNamespace(
        model=model, optimizer=optimizer, ids=ids, labels=labels, loss_mask=loss_mask, top_indices=top_indices, advantages=advantages
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.ids, s.top_indices)
    log_probs = F.log_softmax(logits, -1).gather(-1, s.labels[:, None]).squeeze(-1)
    ratio = torch.exp(log_probs - log_probs.detach())
    pg_loss = -ratio * s.advantages
    loss = (pg_loss * s.loss_mask).sum() / s.loss_mask.sum().clamp(min=1)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

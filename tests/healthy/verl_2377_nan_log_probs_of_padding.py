"""Healthy: the rollout engine fills the log-probs of padding with NaN and its scores with -inf, and a safe masked mean drops both.

The NaN is replaced by the trainer's own detached value before it meets the graph, so ratio is exactly 1 there; the metrics are computed without gradient from the raw tensor, with
where before the sum. Loss, gradients, metrics and weights are finite.
Source: https://github.com/verl-project/verl/pull/2377 (use safe masked mean/sum to handle NaN values outside the mask)
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn


def masked_sum(values, mask):
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values, mask):
    return masked_sum(values, mask) / (mask.sum() + 1e-8)


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids[:, :-1]))).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(0)
    model = Actor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 16, (4, 9))
    mask = (torch.arange(8)[None] < torch.tensor([8, 3, 6, 1])[:, None]).float()
    with torch.no_grad():
        rollout_log_probs = model(ids) + 0.02 * torch.randn(4, 8)
    rollout_log_probs[mask == 0] = float("nan")
    token_scores = torch.where(mask.bool(), torch.randn(4, 8), float("-inf"))
    advantages = torch.randn(4, 1).expand(-1, 8)
    batch = {"ids": ids, "mask": mask, "rollout_log_probs": rollout_log_probs, "token_scores": token_scores, "advantages": advantages}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b, out = s.batch, []
    for _ in range(3):
        log_probs = s.model(b["ids"])
        old_log_probs = torch.where(b["mask"].bool(), b["rollout_log_probs"], log_probs.detach())
        ratio = torch.exp(log_probs - old_log_probs)
        losses = -torch.min(b["advantages"] * ratio, b["advantages"] * ratio.clamp(0.8, 1.2))
        loss = masked_mean(losses, b["mask"])
        with torch.no_grad():
            ppo_kl = masked_mean(b["rollout_log_probs"] - log_probs, b["mask"])
            score = masked_mean(b["token_scores"], b["mask"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append((loss.item(), ppo_kl.item(), score.item()))
    return out


if __name__ == "__main__":
    print(run())

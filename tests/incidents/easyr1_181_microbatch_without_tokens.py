"""GRPO actor update in micro-batches: after the overlong filter one micro-batch has no response token left.

Every loss is a masked mean, sum(values * mask) / sum(mask). Both responses of the second micro-batch ran into the length limit and were masked out, so its mean is 0/0 = NaN; the gradients of the
good micro-batches accumulate into the same buffers and are lost with it.
Source: https://github.com/hiyouga/EasyR1/pull/181 (fix masked mean: an eps in the denominator)
Heals: sum(mask) + eps or clamp(min=1) below the line, or skipping a micro-batch with an empty mask.
Does not: nan_to_num of the loss (backward still divides by zero), clipping the gradients, eps in the advantages.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample"),
    variable=(None, "pg_loss"),
    line=("return (values * mask).sum(dim=dim) / mask.sum(dim=dim)",),
)


def masked_mean(values, mask, dim=None):
    return (values * mask).sum(dim=dim) / mask.sum(dim=dim)


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        logits = self.head(self.rnn(self.embed(ids[:, :-1]))[0])
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def compute_policy_loss(old_log_probs, log_probs, advantages, response_mask, clip_low=0.2, clip_high=0.28):
    negative_approx_kl = torch.clamp(log_probs - old_log_probs, -20.0, 20.0)
    ratio = torch.exp(negative_approx_kl)
    losses = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high))
    pg_loss = masked_mean(losses, response_mask)
    return pg_loss


def build():
    torch.manual_seed(0)
    model = Actor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 16, (6, 9))
    lengths = torch.tensor([5, 8, 8, 8, 3, 6])
    truncated = torch.tensor([False, False, True, True, False, False])
    response_mask = ((torch.arange(8)[None] < lengths[:, None]) & ~truncated[:, None]).float()
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None].expand(-1, 8)
    with torch.no_grad():
        old_log_probs = model(ids)
    return SimpleNamespace(
        model=model, optimizer=optimizer, batch={"ids": ids, "mask": response_mask, "adv": advantages, "old": old_log_probs}
    )


def run(s=None, micro_batch_size=2):
    s = s or build()
    b, metrics = s.batch, []
    n = len(b["ids"]) // micro_batch_size
    for _ in range(2):
        s.optimizer.zero_grad()
        for k in range(n):
            rows = slice(k * micro_batch_size, (k + 1) * micro_batch_size)
            log_probs = s.model(b["ids"][rows])
            loss = compute_policy_loss(b["old"][rows], log_probs, b["adv"][rows], b["mask"][rows]) / n
            loss.backward()
            metrics.append(loss.item())
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return metrics


if __name__ == "__main__":
    print(run())

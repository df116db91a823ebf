"""Importance policy optimisation (asynchronous RL): a token that the inference engine sampled against all odds.

exp(trainer - inference) overflows for a token with an inference log-prob of -97 that the trainer now gives 60 %. The difference of the probabilities is over the threshold, so the token
is masked for the policy gradient, but by a factor: keep_mask * advantage * inf = 0 * inf = NaN.
Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/2085 (ipo loss can produce nan when inference samples very rare token)
Heals: replacing (or clamping) the log ratio of the masked tokens before exp.
Does not: torch.where(keep_mask, pg_loss, 0) afterwards (backward is 0 * inf), a smaller kl_tau, clipping the gradients.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask",),
    op=("exp",),
    index=(9,),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "where_on_detached"),
    variable=("importance_ratio",),
    line=("importance_ratio = torch.exp(log_importance_ratio)",),
)


class TinyPolicy(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(torch.tanh(self.embed(input_ids)))


def selective_log_softmax(logits, index):
    return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def ipo_loss_fn(trainer_logprobs, inference_logprobs, advantages, loss_mask, ipo_threshold=0.1, adv_tau=1.0, kl_tau=1e-3):
    log_importance_ratio = trainer_logprobs - inference_logprobs
    importance_ratio = torch.exp(log_importance_ratio)
    probs_diff = torch.exp(trainer_logprobs) - torch.exp(inference_logprobs)
    is_masked = probs_diff.abs() > ipo_threshold
    keep_mask = loss_mask & ~is_masked
    pg_loss = keep_mask * (adv_tau * advantages) * importance_ratio
    kl_loss = loss_mask * log_importance_ratio**2
    return (-pg_loss + kl_tau * kl_loss).sum()


def build():
    torch.manual_seed(0)
    model = TinyPolicy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    input_ids = torch.randint(0, 20, (14,))
    labels = torch.randint(0, 20, (14,))
    loss_mask = torch.ones(14, dtype=torch.bool)
    loss_mask[:3] = False
    with torch.no_grad():
        h = torch.tanh(model.embed(input_ids[9]))
        model.lm_head.weight[labels[9]] += 3.3 * h / h.dot(h)
        inference_logprobs = selective_log_softmax(model(input_ids), labels) + 0.01 * torch.randn(14)
    inference_logprobs[9] = -97.25
    advantages = torch.where(torch.arange(14) < 8, 0.7, -0.9)
    batch = {
        "input_ids": input_ids,
        "labels": labels,
        "inference_logprobs": inference_logprobs,
        "advantages": advantages,
        "loss_mask": loss_mask,
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b, losses = s.batch, []
    for _ in range(2):
        trainer_logprobs = selective_log_softmax(s.model(b["input_ids"]), b["labels"])
        loss = ipo_loss_fn(trainer_logprobs, b["inference_logprobs"], b["advantages"], b["loss_mask"]) / b["loss_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

"""open-r1 len_reward next to a DPPO binary-KL mask: a group of equal lengths and a certain token look like 0/0 and inf - inf, and do no harm.

Source: https://github.com/huggingface/open-r1 (rewards.py, len_reward returns 0 for equal lengths) and https://github.com/allenai/open-instruct/pull/1755
(per-token binary divergence as a drop mask). The divergence is computed without a graph; for a token with probability 1 it is NaN, `NaN > delta` is
False, so the token is kept with its finite ratio. Where the group's lengths differ the length reward is used, else the where picks 0 (no graph).
Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


def len_reward(lengths, correct):
    low, high = lengths.min(-1, keepdim=True).values, lengths.max(-1, keepdim=True).values
    lam = 0.5 - (lengths - low) / (high - low)
    reward = torch.where(correct, lam, lam.clamp(max=0))
    return torch.where(high == low, torch.zeros_like(reward), reward)


@torch.no_grad()
def binary_kl(logprobs, rollout_logprobs):
    p, q = rollout_logprobs.exp(), logprobs.exp()
    return p * (rollout_logprobs - logprobs) + (1 - p) * (torch.log(1 - p) - torch.log(1 - q))


def dppo_loss(logprobs, rollout_logprobs, advantages, mask, delta=0.1):
    ratio = torch.exp(logprobs - rollout_logprobs)
    divergence = binary_kl(logprobs.detach(), rollout_logprobs)
    unsafe = (divergence > delta) & (((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0)))
    keep = mask & ~unsafe
    return -(torch.where(keep, ratio * advantages, 0.0)).sum() / mask.sum()


def build():
    torch.manual_seed(8)
    model = nn.Sequential(nn.Embedding(12, 12), nn.Linear(12, 12, bias=False))
    ids = torch.randint(0, 10, (8, 7))
    ids[2, 3:5] = torch.tensor([10, 11])
    with torch.no_grad():
        model[1].weight[11] = 50.0 * nn.functional.normalize(model[0].weight[10], dim=0)
        rollout = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        rollout = (rollout + 0.05 * torch.randn(8, 6)).clamp(max=0.0)
        rollout[2, 3] = 0.0
    lengths = torch.tensor([[4.0, 6.0, 5.0, 6.0], [6.0, 6.0, 6.0, 6.0]])
    return SimpleNamespace(
        model=model,
        ids=ids,
        rollout=rollout,
        lengths=lengths,
        correct=torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]]).bool(),
        mask=torch.arange(6)[None] < lengths.view(-1, 1),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5),
    )


def run(s=None):
    s = s or build()
    rewards = s.correct.float() + len_reward(s.lengths, s.correct)
    advantages = (rewards - rewards.mean(-1, keepdim=True)).view(-1, 1)
    logprobs = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    loss = dppo_loss(logprobs, s.rollout, advantages, s.mask)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

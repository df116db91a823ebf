"""A small GRPO run whose padding drifts until exp overflows, and how it ends before that. Golden pictures show lines of this file: it changes seldom."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, TOKENS = 6, 24
LENGTHS = torch.tensor([17, 9, 20, 24, 11, 6])
DRIFT = 0.45  # nat a step, for each token behind the last that counts
LAST, CALM = 11, 5  # steps: of the run that ends in NaN, and of the one that stays healthy


def grpo_loss(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old_logps)
    per_token_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    ref_log_ratio = ref_logps - logps
    per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1
    per_token_loss = per_token_loss + 0.04 * per_token_kl
    return (per_token_loss * mask).sum() / mask.sum()


def train(steps: int) -> None:
    """Sines instead of random numbers: the run is the same wherever it is made."""
    place = torch.arange(ROWS * TOKENS, dtype=torch.float32).reshape(ROWS, TOKENS)
    behind = (torch.arange(TOKENS) - LENGTHS[:, None] + 1).clamp(min=0).float()
    features = torch.stack([torch.sin(place), torch.cos(0.7 * place), behind], dim=-1)
    mask = (behind == 0).float()
    policy, ref_policy = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    with torch.no_grad():
        for model in (policy, ref_policy):
            model.weight.copy_(torch.tensor([[0.3, -0.2, 0.0]]))
            model.bias.fill_(-1.5)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.02)
    for step in range(steps):
        advantages = torch.sin(torch.arange(ROWS) + 0.3 * step)[:, None]
        with torch.no_grad():
            ref_logps, old_logps = ref_policy(features).squeeze(-1), policy(features).squeeze(-1)
            policy.weight[0, 2] -= DRIFT  # nothing holds the policy where the mask is 0
        logps = policy(features).squeeze(-1)
        loss = grpo_loss(logps, old_logps, ref_logps, advantages, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

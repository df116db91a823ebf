"""slime's `vanilla_tis_function`: exp of a rollout mismatch overflows to inf and is truncated, all of it without a gradient.

The rollout engine reported -105 for one token that the trainer gives -1.3. The truncated importance weight clamp(inf, 0, 2) is 2, a
constant that multiplies the policy loss; nothing goes back through exp. The logged mean of the raw weight is inf and goes nowhere else: healthy.

Source: https://github.com/THUDM/slime/blob/main/slime/backends/megatron_utils/loss.py (vanilla_tis_function).
"""

from types import SimpleNamespace

import torch
from torch import nn


@torch.no_grad()
def vanilla_tis_function(train_log_probs, rollout_log_probs, low=0.0, high=2.0):
    tis = torch.exp(train_log_probs - rollout_log_probs)
    tis_abs = torch.exp((train_log_probs - rollout_log_probs).abs())
    tis_weights = torch.clamp(tis, min=low, max=high)
    tis_clipfrac = (tis_weights != tis).float()
    return tis_weights, {"tis": tis.mean().item(), "tis_abs": tis_abs.mean().item(), "tis_clipfrac": tis_clipfrac.mean().item()}


def compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high):
    ratio = (-ppo_kl).exp()
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages)


def build():
    torch.manual_seed(13)
    model = nn.Sequential(nn.Embedding(12, 8), nn.GELU(), nn.Linear(8, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 12, (2, 9))
    with torch.no_grad():
        train = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    rollout = train + 0.05 * torch.randn_like(train)
    rollout[1, 3] = -105.0
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        batch={"tokens": tokens, "old": train, "rollout": rollout, "advantages": torch.tensor([[-0.7], [0.7]])},
        log=[],
    )


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(3):
        log_probs = s.model(b["tokens"][:, :-1]).log_softmax(-1).gather(-1, b["tokens"][:, 1:].unsqueeze(-1)).squeeze(-1)
        pg_loss = compute_policy_loss(b["old"] - log_probs, b["advantages"], 0.2, 0.28)
        weights, metrics = vanilla_tis_function(b["old"], b["rollout"])
        s.log.append(metrics)
        loss = (pg_loss * weights).mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

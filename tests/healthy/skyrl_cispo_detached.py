"""CISPO caps the importance weight and detaches it, so a ratio that overflows to inf becomes the cap and no gradient goes through exp."""

from types import SimpleNamespace

import torch
import torch.nn as nn


def cispo_policy_loss(log_probs, old_log_probs, advantages, cfg, loss_mask):
    ratio = torch.exp(log_probs - old_log_probs)
    clamped_ratio = torch.clamp(ratio, 1 - cfg.eps_clip_low, 1 + cfg.eps_clip_high)
    loss = -advantages * clamped_ratio.detach() * log_probs
    is_clipped = (ratio < 1 - cfg.eps_clip_low) | (ratio > 1 + cfg.eps_clip_high)
    clip_ratio = (is_clipped.float() * loss_mask).sum() / loss_mask.sum()
    return (loss * loss_mask).sum() / loss_mask.sum(), clip_ratio.item()


def build():
    torch.manual_seed(115)
    policy = nn.Sequential(nn.Embedding(19, 8), nn.Linear(8, 19))
    sequences = torch.randint(0, 19, (3, 9))
    loss_mask = torch.ones(3, 8)
    loss_mask[2, 6:] = 0
    with torch.no_grad():
        old_log_probs = policy(sequences[:, :-1]).log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)
    old_log_probs[1, 5] = -131.0
    old_log_probs[2, 7] = -240.0
    batch = {
        "sequences": sequences,
        "loss_mask": loss_mask,
        "old_log_probs": old_log_probs,
        "advantages": torch.tensor([[0.5], [-0.8], [0.3]]).expand(3, 8),
    }
    cfg = SimpleNamespace(eps_clip_low=1.0, eps_clip_high=4.0)
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-5), batch=batch, cfg=cfg)


def run(s=None):
    s = s or build()
    b = s.batch
    log_probs = s.model(b["sequences"][:, :-1]).log_softmax(-1).gather(-1, b["sequences"][:, 1:, None]).squeeze(-1)
    loss, s.clip_ratio = cispo_policy_loss(log_probs, b["old_log_probs"], b["advantages"], s.cfg, b["loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

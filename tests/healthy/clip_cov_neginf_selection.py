"""Entropy-Mechanism-of-RL / verl, compute_policy_loss_clip_cov
(https://github.com/PRIME-RL/Entropy-Mechanism-of-RL/blob/main/verl/trainer/ppo/core_algos.py): the covariance of padding and of clipped tokens
is set to -inf so that those tokens are never chosen. The covariance only serves comparisons, the -inf touch neither loss nor gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


def compute_policy_loss_clip_cov(old_log_prob, log_prob, advantages, response_mask, cliprange, clip_ratio, clip_cov_lb, clip_cov_ub):
    ratio = torch.exp(log_prob - old_log_prob)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - cliprange, 1 + cliprange)
    clip_by_origin = (pg_losses2 > pg_losses1) & (response_mask > 0)

    corr = torch.ones_like(advantages)
    cov_all = (advantages - masked_mean(advantages, response_mask)) * (log_prob - masked_mean(log_prob.detach(), response_mask))
    cov_all[response_mask == 0] = -torch.inf
    cov_all[clip_by_origin] = -torch.inf

    clip_num = max(int(clip_ratio * response_mask.sum().item()), 1)
    top_k_idx = torch.nonzero((cov_all < clip_cov_ub) & (cov_all > clip_cov_lb) & (response_mask > 0))
    if len(top_k_idx) > 0:
        top_k_idx = top_k_idx[torch.randperm(len(top_k_idx))[: min(clip_num, len(top_k_idx))]]
    corr[top_k_idx[:, 0], top_k_idx[:, 1]] = 0

    pg_losses = torch.maximum(pg_losses1, pg_losses2) * corr
    return masked_mean(pg_losses, response_mask), cov_all.detach().amin()


class Actor(nn.Module):
    def __init__(self, vocab=18, dim=10):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        return self.lm_head(x + torch.nn.functional.silu(self.mlp(x)))


def build():
    torch.manual_seed(5)
    actor = Actor()
    ids = torch.randint(0, 18, (4, 9))
    with torch.no_grad():
        old = actor(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) + 0.3 * torch.randn(4, 8)
    response_mask = torch.ones(4, 8)
    response_mask[0, 5:] = 0
    response_mask[3, 3:] = 0
    advantages = torch.tensor([[1.2], [-0.4], [0.9], [-1.7]]) * response_mask
    return SimpleNamespace(
        model=actor,
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4),
        ids=ids,
        old=old,
        response_mask=response_mask,
        advantages=advantages,
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        log_prob = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        loss, s.cov_min = compute_policy_loss_clip_cov(s.old, log_prob, s.advantages, s.response_mask, 0.2, 0.1, 0.1, 5.0)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())

"""Healthy. VESPO "is_reshape v4": the soft trust region r * sech^2(tau (r - 1) / 2) of a stale token, cosh of hundreds of millions.

The log ratio is clamped at 20, so r is at most 4.9e8 - and cosh of half of that is inf, its square is inf, 1 / inf is 0: the token is shut out, r * 0 = 0 with a finite r. The weight is detached,
so the backward of cosh never runs.

Source: https://github.com/FloyedShen/VESPO/blob/057a38f0/recipe/is_shape/code/core_algos.py (compute_policy_loss_is_reshape_v4, _sech2)
"""

from types import SimpleNamespace

import torch
from torch import nn


class Actor(nn.Module):
    def __init__(self, vocab=25, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def logprobs(self, ids):
        h, _ = self.gru(self.wte(ids[:, :-1]))
        return self.head(h).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def _sech2(x):
    return 1.0 / torch.cosh(x).pow(2)


def compute_policy_loss_is_reshape_v4(old_log_prob, log_prob, advantages, response_mask, tau=1.0, beta=1.0, gamma_min=0.0, gamma_max=1.0):
    log_r = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    r = torch.exp(log_r)
    gamma = gamma_min + (gamma_max - gamma_min) * torch.sigmoid(beta * advantages.abs())
    sapo_weight = r * _sech2(tau * (r - 1) / 2)
    weight = (1 - gamma) + gamma * sapo_weight
    weight_detached = weight.detach()
    return -(weight_detached * log_prob * advantages * response_mask).sum() / (response_mask.sum() + 1e-8)


def build():
    torch.manual_seed(6)
    actor = Actor()
    ids = torch.randint(0, 25, (4, 9))
    with torch.no_grad():
        old = actor.logprobs(ids) + 0.05 * torch.randn(4, 8)
    old[1, 3] -= 14.0
    old[3, 6] -= 80.0  # a token that the rollout engine reported from another version
    mask = torch.ones(4, 8)
    mask[:, :2] = 0
    advantages = torch.tensor([1.2, -0.7, 0.4, -0.9])[:, None].expand(4, 8)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
    return SimpleNamespace(model=actor, optimizer=optimizer, batch={"ids": ids, "old": old, "advantages": advantages, "mask": mask})


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(3):
        loss = compute_policy_loss_is_reshape_v4(b["old"], s.model.logprobs(b["ids"]), b["advantages"], b["mask"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

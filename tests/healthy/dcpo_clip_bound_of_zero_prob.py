"""Healthy. DCPO's dynamic clip range for a token whose old probability is exactly 0: infinities on purpose and by the way, none of them harmful.

The token that ends the thinking was forced, the policy gives it a log-probability below -115 and exp of that is 0. 4 * eps / 0 is inf in both bounds; the
lower one is replaced by 0 in torch.where, for the upper one torch.where writes inf itself, sqrt(inf) is inf, and clamp makes it 10. Nothing of it has a gradient
(old_log_prob is a constant), the ratio is formed from log-probabilities and is 1.
Source: https://github.com/lime-RL/DCPO, verl/trainer/ppo/core_algos.py (get_clip_low_high), read in https://github.com/elysiameik-afk/dcpomol
"""

import math
from types import SimpleNamespace

import torch
from torch import nn


END_THINK = 3


class Actor(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed_tokens(ids))[0])


def response_log_prob(actor, ids, response_length):
    logits = actor(ids)[:, -response_length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -response_length:, None]).squeeze(-1)


def get_clip_low_high(old_log_prob, low_clip=0.16, high_clip=0.2, clip_ratio_c=10.0):
    old_prob = torch.exp(old_log_prob)
    low_c = torch.where(old_prob != 0, 4 * low_clip / old_prob, 0)
    low_c = 1 - low_c
    low_c = low_c * (low_c >= 0)
    high_c = torch.where(old_prob != 0, 1 + 4 * high_clip / old_prob, math.inf)
    low = (1 + torch.sqrt(low_c)) / 2
    high = (1 + torch.sqrt(high_c)) / 2
    return low, torch.clamp(high, 0, max(clip_ratio_c, 10))


def compute_policy_loss_dcpo(old_log_prob, log_prob, advantages, response_mask, clip_ratio_c=10.0):
    ratio = torch.exp(log_prob - old_log_prob)
    cliprange_low, cliprange_high = get_clip_low_high(old_log_prob, clip_ratio_c=clip_ratio_c)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, cliprange_low, cliprange_high)
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    clip_pg_losses2 = torch.min(-advantages * clip_ratio_c, clip_pg_losses1)
    pg_losses = torch.where(advantages < 0, clip_pg_losses2, clip_pg_losses1)
    return ((pg_losses * response_mask).sum(-1) / response_mask.sum(-1)).mean()  # only-token-mean


def build():
    torch.manual_seed(31)
    actor = Actor()
    with torch.no_grad():
        actor.lm_head.bias[END_THINK] = -115.0
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
    ids = torch.randint(4, 32, (4, 12))
    ids[2, 9] = END_THINK  # forced when the thinking budget is spent
    response_mask = torch.ones(4, 8)
    response_mask[1, 6:] = 0
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    advantages = ((rewards - rewards.mean()) / rewards.std())[:, None] * response_mask
    with torch.no_grad():
        old_log_prob = response_log_prob(actor, ids, 8)
    return SimpleNamespace(
        model=actor, optimizer=optimizer, batch=dict(ids=ids, response_mask=response_mask, advantages=advantages, old_log_prob=old_log_prob)
    )


def run(s=None):
    s = s or build()
    b = s.batch
    losses = []
    for _ in range(2):
        log_prob = response_log_prob(s.model, b["ids"], 8)
        pg_loss = compute_policy_loss_dcpo(b["old_log_prob"], log_prob, b["advantages"], b["response_mask"])
        s.optimizer.zero_grad()
        pg_loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        losses.append(pg_loss.item())
    return losses


if __name__ == "__main__":
    print(run())

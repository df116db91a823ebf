"""Asynchronous samples are weighed by 1 / (1 + exp(k * (age - limit))); exp is inf for very old ones and 1 / inf is the 0 that is meant.

The weights are made without gradient. The token ratio is floored before exp, a group of equal rewards takes the guarded branch, and the
causal mask holds -inf where it should. Loss, gradients and weights stay finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class TinyDecoder(nn.Module):
    def __init__(self, vocab=16, width=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, lengths):
        x = self.emb(ids)
        n = ids.shape[1]
        allowed = torch.ones(n, n, dtype=torch.bool).tril()[None] & (torch.arange(n)[None, None] < lengths[:, None, None])
        scores = (self.q(x) @ self.k(x).transpose(1, 2)) / x.shape[-1] ** 0.5
        attn = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(x + attn @ self.v(x))


def selected_logp(model, ids, lengths):
    logits = model(ids[:, :-1], lengths - 1)
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def staleness_weights(version, versions, limit=4.0, sharpness=3.0):
    age = (version - versions).float()
    return 1.0 / (1.0 + torch.exp(sharpness * (age - limit)))


@torch.no_grad()
def group_advantages(rewards, group_size):
    grouped = rewards.view(-1, group_size)
    mean, std = grouped.mean(1, keepdim=True), grouped.std(1, keepdim=True)
    centred = grouped - mean
    return torch.where(std > 1e-6, centred / std, centred).flatten()


def build():
    torch.manual_seed(404)
    model = TinyDecoder()
    ids = torch.randint(0, 16, (6, 9))
    lengths = torch.tensor([9, 7, 9, 4, 8, 9])
    mask = (torch.arange(8)[None] < (lengths - 1)[:, None]).float()
    mask[:, :2] = 0
    with torch.no_grad():
        old = selected_logp(model, ids, lengths)
    old[4, 3] += 240.0  # a token of an older tokenizer
    old[3, 6] -= 300.0  # padding
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    versions = torch.tensor([57, 58, 12, 55, 58, 57])
    batch = dict(ids=ids, lengths=lengths, mask=mask, old=old, rewards=rewards, versions=versions)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch, version=58)


def run(s=None):
    s = s or build()
    b, total = s.batch, 0.0
    weights = staleness_weights(s.version, b["versions"])
    advantages = group_advantages(b["rewards"], 3)
    tokens = b["mask"].sum()
    s.optimizer.zero_grad()
    for rows in torch.arange(6).split(3):
        mask = b["mask"][rows]
        logp = selected_logp(s.model, b["ids"][rows], b["lengths"][rows])
        log_ratio = torch.where(mask.bool(), logp - b["old"][rows], 0.0).clamp(-20.0, 20.0)
        ratio = log_ratio.exp()
        adv = advantages[rows, None]
        pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        k3 = torch.exp(-log_ratio) - 1 + log_ratio
        loss = ((pg + 1e-3 * k3) * weights[rows, None] * mask).sum() / tokens
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return total

"""Healthy: a rollout worker with a preallocated key/value cache whose unused rows are NaN.

The cache is allocated once for the maximal length and filled with NaN (a debug fill: reading past the end must be noticed). The decoding loop writes row t and
reads rows [: t + 1] only; the attention is computed on this slice. The old log-probabilities are finite, and the trainer recomputes its own with a
full causal pass. NaN never enters an arithmetic operation.
Source: the static cache of gpt-fast / torchtune (KVCache.update, reads restricted to the filled part), https://github.com/meta-pytorch/torchtune.  Healthy.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class KVCache:
    def __init__(self, batch, max_len, dim):
        self.k = torch.full((batch, max_len, dim), float("nan"))
        self.v = torch.full((batch, max_len, dim), float("nan"))
        self.size = 0

    def update(self, k, v):
        self.k[:, self.size] = k
        self.v[:, self.size] = v
        self.size += 1
        return self.k[:, : self.size], self.v[:, : self.size]


class Policy(nn.Module):
    def __init__(self, vocab=11, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return self.lm_head(x + scores.masked_fill(causal, float("-inf")).softmax(-1) @ v)

    def decode(self, token, cache):
        x = self.embed(token)
        q, k, v = self.qkv(x).chunk(3, -1)
        keys, values = cache.update(k, v)
        attn = (torch.einsum("bd,btd->bt", q, keys) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.lm_head(x + torch.einsum("bt,btd->bd", attn, values))


@torch.no_grad()
def rollout(policy, prompt, new_tokens, max_len, generator):
    cache = KVCache(prompt.shape[0], max_len, 8)
    for t in range(prompt.shape[1] - 1):
        policy.decode(prompt[:, t], cache)
    tokens, old_logp, token = [prompt], [], prompt[:, -1]
    for _ in range(new_tokens):
        logp = policy.decode(token, cache).log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator).squeeze(-1)
        old_logp.append(logp.gather(-1, token[:, None]))
        tokens.append(token[:, None])
    return torch.cat(tokens, 1), torch.cat(old_logp, 1)


def build():
    torch.manual_seed(9)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"prompt": torch.randint(0, 11, (4, 3)), "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5])}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, generator=torch.Generator().manual_seed(2))


def run(s=None):
    s = s or build()
    out = []
    for _ in range(3):
        prompt, adv = s.batch["prompt"], s.batch["advantages"][:, None]
        ids, old_logp = rollout(s.model, prompt, 5, 64, s.generator)
        logp = s.model(ids)[:, prompt.shape[1] - 1 : -1].log_softmax(-1)
        logp = logp.gather(-1, ids[:, prompt.shape[1] :, None]).squeeze(-1)
        ratio = (logp - old_logp).exp()
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

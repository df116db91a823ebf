"""A trained model keeps one outlier weight thousands of times its neighbours; the norm behind it absorbs the massive activation."""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, h):
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return h + self.down(torch.nn.functional.silu(self.up(y)))


class Policy(nn.Module):
    def __init__(self, vocab=16, width=10):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.final = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.final(h))


def build():
    torch.manual_seed(352)
    policy = Policy()
    with torch.no_grad():
        policy.layers[0].down.weight[6, 3] = 2.4e3
        policy.layers[1].scale[6] = 1e-3
    batch = {"ids": torch.randint(0, 16, (4, 7)), "adv": torch.tensor([1.2, -0.8, 0.1, -0.5])}
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-5), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    logp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(torch.exp(logp - logp.detach()) * s.batch["adv"][:, None]).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

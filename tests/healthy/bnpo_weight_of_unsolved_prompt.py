"""Healthy. BNPO: a prompt that nobody solves has pass rate 0, its beta density is 0 and the weight 1 / 0 = inf.

log_prob of Beta(alpha, beta) at 0 with alpha > 1 is -inf, exp makes 0 of it, 1 / 0 is inf. The weight is clamped at 1e6, and then multiplied with score - pass rate, which is exactly 0 for every answer
of that prompt. Nothing here has a gradient. The same happens at the other end for a prompt that everybody solves.

Source: https://github.com/changyi7231/BNPO/blob/main/recipe/bnpo/src/bnpo_ray_trainer.py (compute_bnpo_outcome_advantage)
"""

from types import SimpleNamespace

import torch
from torch import nn


class Actor(nn.Module):
    def __init__(self, vocab=20, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.out(self.norm(self.embed(tokens)))


@torch.no_grad()
def beta_normalised_advantages(scores):
    """scores: prompts x answers, 0 or 1"""
    p = scores.mean(dim=1)
    p_mean, p_var = p.mean(), p.var()
    common = p_mean * (1 - p_mean) / p_var - 1
    alpha = torch.clamp(1 + common * p_mean / 3, min=1.0)
    beta = torch.clamp(1 + common * (1 - p_mean) / 3, min=1.0)
    log_density = torch.distributions.Beta(alpha, beta).log_prob(p)
    weight = 1 / log_density.exp()
    weight = torch.clamp(weight, min=0, max=1e6)
    return weight[:, None] * (scores - p[:, None])


def build():
    torch.manual_seed(5)
    actor = Actor()
    tokens = torch.randint(0, 20, (16, 7))
    scores = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.float32)
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    return SimpleNamespace(model=actor, optimizer=optimizer, batch={"tokens": tokens, "scores": scores})


def run(s=None):
    s = s or build()
    advantages = beta_normalised_advantages(s.batch["scores"]).reshape(-1, 1)
    tokens = s.batch["tokens"]
    old = None
    for _ in range(3):
        logp = s.model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        old = logp.detach() if old is None else old
        ratio = torch.exp(logp - old)
        loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

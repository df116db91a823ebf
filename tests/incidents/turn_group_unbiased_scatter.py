"""Unbiased group deviation written with scatter sums divides by count - 1; the prompt with a single surviving rollout gives 0/0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single", "zero_div_zero"),
    op=("div",),
    index=(2,),
    masked=False,
    role=("advantages", "rewards"),
    fix=("guard_small_group", "clamp_denominator"),
    variable=("spread",),
    line=("spread = torch.zeros(prompts).scatter_add_(0, prompt, gap * gap) / (size - 1)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=17, width=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        return self.out(self.emb(ids).cumsum(1) / 3)


@torch.no_grad()
def group_scores(score, prompt, prompts):
    ones = torch.ones_like(score)
    size = torch.zeros(prompts).scatter_add_(0, prompt, ones)
    centre = torch.zeros(prompts).scatter_add_(0, prompt, score) / size
    gap = score - centre[prompt]
    spread = torch.zeros(prompts).scatter_add_(0, prompt, gap * gap) / (size - 1)
    return gap / (spread[prompt].sqrt() + 1e-4)


def build():
    torch.manual_seed(325)
    policy = Policy()
    batch = {
        "ids": torch.randint(0, 17, (8, 5)),
        "prompt": torch.tensor([0, 1, 3, 1, 2, 0, 3, 0]),
        "score": torch.tensor([0.2, 1.0, 0.0, 0.3, 0.6, 0.9, 1.0, 0.1]),
    }
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    adv = group_scores(s.batch["score"], prompt=s.batch["prompt"], prompts=4)
    s.optimizer.zero_grad()
    losses = []
    for rows in (slice(0, 4), slice(4, 8)):
        logp = s.model(ids[rows, :-1]).log_softmax(-1).gather(-1, ids[rows, 1:, None]).squeeze(-1)
        part = -(torch.exp(logp - logp.detach()) * adv[rows, None]).mean() / 2
        part.backward()
        losses.append(part.detach())
    s.optimizer.step()
    return torch.stack(losses).sum()

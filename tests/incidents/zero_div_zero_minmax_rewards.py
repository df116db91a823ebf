"""Rewards are rescaled per prompt with (r - min) / (max - min); a prompt where every answer scored the same gives 0/0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(4,),
    masked=False,
    role=("rewards", "advantages"),
    fix=("clamp_denominator",),
    variable=("scaled",),
    line=("scaled = (rewards - low[prompt_id]) / (high - low)[prompt_id]",),
)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(13, 7)
        self.head = nn.Linear(7, 13)

    def forward(self, ids):
        return torch.log_softmax(self.head(self.wte(ids)), dim=-1)


def rescale_by_prompt(rewards, prompt_id):
    n = int(prompt_id.max()) + 1
    low = torch.full((n,), torch.finfo(rewards.dtype).max).scatter_reduce(0, prompt_id, rewards, reduce="amin")
    high = torch.full((n,), torch.finfo(rewards.dtype).min).scatter_reduce(0, prompt_id, rewards, reduce="amax")
    scaled = (rewards - low[prompt_id]) / (high - low)[prompt_id]
    return 2 * scaled - 1


def build():
    torch.manual_seed(52)
    model = Generator()
    prompt_id = torch.tensor([0, 2, 0, 2, 1, 2, 1, 0])
    rewards = torch.tensor([0.1, 0.9, 0.7, 0.2, 0.5, 0.3, 0.5, 0.4])
    batch = dict(ids=torch.randint(0, 13, (8, 6)), prompt_id=prompt_id, rewards=rewards)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.02), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    goal = rescale_by_prompt(s.batch["rewards"], prompt_id=s.batch["prompt_id"])
    total = torch.zeros(())
    for rows in torch.arange(8).split(4):
        lp = s.model(ids[rows, :-1]).gather(-1, ids[rows, 1:].unsqueeze(-1)).squeeze(-1)
        part = -(goal[rows] * lp.mean(-1)).sum() / 8
        part.backward()
        total += part.detach()
    s.optimizer.step()
    return total

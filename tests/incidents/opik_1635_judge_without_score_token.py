"""opik #1635 - a G-Eval judge's score is the probability-weighted mean of the digits among its top log-probs.

One answer of the judge has no digit among them (the tokenizer split the JSON differently): the weights sum to 0 and the score is 0/0.
The score is the RL reward, so the group's mean, std and all its advantages are NaN.
Source: https://github.com/comet-ml/opik/issues/1635 . Heals: a floor under the total, a guard for "no digit found", dropping that
rollout. Does not: a larger epsilon under the group's std, clipping the advantages.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(5,),
    masked=None,
    role=("rewards",),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "representable_eps"),
    variable=("scores",),
    line=("scores = weighted / total",),
)


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(torch.tanh(self.embed(ids)))


def judge_scores(answers):
    """answers: for each rollout the judge's {token: logprob} at the score's place; a digit counts with its probability."""
    weighted, total = torch.zeros(len(answers)), torch.zeros(len(answers))
    for i, top_logprobs in enumerate(answers):
        for token, logprob in top_logprobs.items():
            if token.strip().isdigit() and 0 <= int(token) <= 10:
                weighted[i] += int(token) * math.exp(logprob)
                total[i] += math.exp(logprob)
    scores = weighted / total
    return scores / 10.0


def grpo_advantages(rewards, group_size):
    r = rewards.view(-1, group_size)
    return ((r - r.mean(-1, keepdim=True)) / (r.std(-1, keepdim=True) + 1e-4)).flatten()


def build():
    torch.manual_seed(35)
    model = Actor()
    ids = torch.randint(0, 16, (8, 6))
    answers = [
        {"7": -0.2, "8": -1.9},
        {"3": -0.1, "4": -2.6},
        {"9": -0.4, "8": -1.2},
        {"5": -0.7, "6": -0.8},
        {"2": -0.3, "1": -1.6},
        {'":': 0.0, '":\n': -20.6, '"': -21.3},
        {"6": -0.5, "7": -1.1},
        {"4": -0.1},
    ]
    return SimpleNamespace(model=model, ids=ids, answers=answers, group_size=4, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    rewards = judge_scores(s.answers)
    advantages = grpo_advantages(rewards, s.group_size)
    logps = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    loss = -(torch.exp(logps - logps.detach()) * advantages.unsqueeze(1)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

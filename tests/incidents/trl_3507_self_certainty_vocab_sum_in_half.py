"""TRL #3507 (INTUITOR) - self-certainty KL(U || p) is used as the reward; its sum over the vocabulary runs in half precision.

The score of a token is -1/V * sum_v log p_v - log V. With fp16 log-probs of a very certain token the sum over the vocabulary passes -65504,
the score of that completion is inf, and the group normalisation makes inf - inf = NaN of the whole group.
Source: https://github.com/huggingface/trl/pull/3507 . Heals: summing (or everything) in fp32, or the mean, which accumulates in fp32.
Does not: converting the finished sum to fp32, a larger epsilon under the group's std.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow", "inf_minus_inf"),
    op=("sum",),
    index=(2, 4),
    masked=False,
    role=("log_probs", "rewards", "entropy", "kl"),
    fix=("upcast_fp32", "stable_function"),
    variable=("total",),
    line=("total = logps.sum(dim=-1)",),
)
VOCAB = 4096


class HalfLM(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def self_certainty(logits, completion_mask):
    logps = logits.log_softmax(-1)
    total = logps.sum(dim=-1)
    per_token = -total / VOCAB - math.log(VOCAB)
    mask = completion_mask.to(per_token.dtype)
    return (per_token * mask).sum(-1) / mask.sum(-1)


def group_advantages(rewards, num_generations):
    rewards = rewards.view(-1, num_generations).float()
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    return ((rewards - mean) / (std + 1e-4)).view(-1)


def build():
    torch.manual_seed(34)
    model = HalfLM()
    with torch.no_grad():
        model.embed.weight[7] = 0.0
        model.embed.weight[7, 0] = 6.0
        model.lm_head.weight[11, 0] = 3.5  # after token 7 the model is certain of token 11
    model = model.half()
    ids = torch.randint(12, 64, (8, 7))
    ids[2, 4], ids[2, 5] = 7, 11
    completion_mask = torch.ones(8, 6)
    completion_mask[5, 4:] = 0
    return SimpleNamespace(
        model=model, ids=ids, completion_mask=completion_mask, num_generations=4, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2)
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[:, :-1])
    with torch.no_grad():
        rewards = self_certainty(logits, s.completion_mask)
        advantages = group_advantages(rewards, s.num_generations)
    per_token_logps = logits.float().log_softmax(-1).gather(-1, s.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(per_token_logps - per_token_logps.detach())
    loss = -(ratio * advantages.unsqueeze(1) * s.completion_mask).sum() / s.completion_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

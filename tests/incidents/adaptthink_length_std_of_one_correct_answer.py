"""A length-aware reward in the manner of AdaptThink's reward manager: lengths are standardised over the correct answers of each prompt.

The manager guards the prompt without a correct answer, but not the prompt with exactly one: the unbiased std of one length is NaN, adding eps
does not help, the answer's reward is NaN, and so are the mean, the std and every advantage of its group, and the loss.

Source: https://github.com/bojieli/AdaptThink/blob/main/src/adapt_think_reward_manager.py and its vectorised forks (id2std_len =
correct_lengths.std() + eps, guarded only for numel() == 0)
Heals: a std of 1 for fewer than two correct answers. Does not: a larger eps, skipping groups whose rewards are all equal.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,
    role=("rewards", "advantages"),
    fix=("guard_small_group",),
    variable=("std_len", None),
    line=("std_len = correct_lengths.std() + eps",),
)


def length_stats(acc, lengths, eps=1e-6):
    correct_lengths = lengths[acc == 1]
    if correct_lengths.numel() == 0:
        return torch.tensor(0.0), torch.tensor(1.0)
    mean_len = correct_lengths.mean()
    std_len = correct_lengths.std() + eps
    return mean_len, std_len


def adapt_think_rewards(acc, lengths, uids, length_bonus=0.4):
    rewards = torch.zeros_like(acc)
    for uid in sorted(set(uids)):
        rows = torch.tensor([i for i, u in enumerate(uids) if u == uid])
        mean_len, std_len = length_stats(acc[rows], lengths[rows])
        z = (lengths[rows] - mean_len) / std_len
        shaped = 1.0 - length_bonus * torch.sigmoid(z)
        rewards[rows] = torch.where(acc[rows] == 1, shaped, torch.zeros_like(shaped))
    return rewards


def grpo_advantages(rewards, group_size, eps=1e-4):
    grouped = rewards.view(-1, group_size)
    mean = grouped.mean(1, keepdim=True)
    std = grouped.std(1, keepdim=True)
    return ((grouped - mean) / (std + eps)).view(-1)


def build():
    torch.manual_seed(14)
    model = nn.Sequential(nn.Embedding(25, 16), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 25, (8, 11))
    lengths = torch.tensor([6.0, 10.0, 8.0, 9.0, 10.0, 7.0, 10.0, 10.0])
    mask = (torch.arange(10)[None] < lengths[:, None]).float()
    acc = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0])  # the second prompt was solved once
    uids = ["a"] * 4 + ["b"] * 4
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, lengths=lengths, mask=mask, acc=acc, uids=uids)


def run(s=None):
    s = s or build()
    with torch.no_grad():
        rewards = adapt_think_rewards(s.acc, s.lengths, s.uids)
        advantages = grpo_advantages(rewards, group_size=4)
    log_probs = F.log_softmax(s.model(s.ids[:, :-1]), -1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    ratio = torch.exp(log_probs - log_probs.detach())
    loss = -(ratio * advantages[:, None] * s.mask).sum() / s.mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

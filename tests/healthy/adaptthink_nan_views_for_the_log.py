"""AdaptThink's reward manager: NaN on purpose. The rewards are copied into two views, NaN where the mode does not apply, and turned into None for
the log; the std of the lengths of a single correct answer is NaN as well and is only logged. The rewards that train are finite.

Source: https://github.com/bojieli/AdaptThink/blob/main/src/adapt_think_reward_manager.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def reward_manager(acc, lengths, enforce_nothinking, ref_acc, ref_len, nothinking_bonus=0.05, length_bonus=0.3, eps=1e-6):
    thinking = ~enforce_nothinking
    correct_lengths = lengths[thinking & (acc == 1)]
    mean_len = correct_lengths.mean()
    std_len = correct_lengths.std(correction=1) + eps  # one correct answer with thinking: NaN, for the log only
    easiness = ref_acc * 0.9 + eps
    efficiency = mean_len / (ref_len + eps)
    thinking_bonus = length_bonus * torch.exp(-efficiency * easiness)
    rewards = acc - easiness
    rewards = rewards + (acc.bool() & enforce_nothinking).float() * nothinking_bonus
    rewards = rewards + (acc.bool() & thinking).float() * thinking_bonus
    nan = torch.tensor(float("nan"))
    nothinking_reward = torch.where(enforce_nothinking, rewards, nan)
    thinking_reward = torch.where(thinking, rewards, nan)
    extra = {
        "nothinking_reward": [None if torch.isnan(r) else r.item() for r in nothinking_reward],
        "thinking_reward": [None if torch.isnan(r) else r.item() for r in thinking_reward],
        "thinking_reward_mean": torch.nanmean(thinking_reward).item(),
        "std_len": std_len.item(),
    }
    return rewards, extra


def build():
    torch.manual_seed(31)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 20, (6, 9))
    lengths = torch.tensor([8.0, 6.0, 8.0, 3.0, 5.0, 2.0])
    mask = (torch.arange(8)[None] < lengths[:, None]).float()
    acc = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    enforce_nothinking = torch.tensor([False, False, False, True, True, True])
    return SimpleNamespace(
        model=model, optimizer=optimizer, ids=ids, lengths=lengths, mask=mask, acc=acc, enforce_nothinking=enforce_nothinking, logs=[]
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        rewards, extra = reward_manager(s.acc, s.lengths, s.enforce_nothinking, ref_acc=0.6, ref_len=7.0)
        s.logs.append(extra)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    log_probs = F.log_softmax(s.model(s.ids[:, :-1]), -1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    ratio = torch.exp(log_probs - log_probs.detach())
    loss = -(ratio * advantages[:, None] * s.mask).sum() / s.mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

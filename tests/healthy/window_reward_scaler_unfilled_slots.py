"""Healthy. A rollout worker scales rewards by a window of past rewards; the slots that were not written yet are NaN, and so are aborted rollouts.

The ring buffer is made of NaN so that nobody reads a 0 as a reward. Mean and deviation are taken over the slots that hold a number. The reward of an
aborted rollout is NaN as well; its row is dropped by index before advantages are formed, and before the forward. A window with fewer than two numbers
leaves rewards alone. No NaN takes part in anything that is differentiated.

Source: WindowRewardScaler of https://github.com/kilroybot/kilroy-module-pytorch-py-sdk (window of past rewards, isnan taken care of), inside a REINFORCE
worker for language models
"""

from types import SimpleNamespace

import torch
from torch import nn


class WindowRewardScaler(nn.Module):
    def __init__(self, length=64):
        super().__init__()
        self.register_buffer("window", torch.full((length,), float("nan")))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def push(self, rewards):
        for reward in rewards:
            self.window[self.cursor % self.window.numel()] = reward
            self.cursor += 1

    @torch.no_grad()
    def forward(self, rewards):
        filled = torch.isfinite(self.window)
        if filled.sum() < 2:
            return rewards
        mean = torch.nanmean(self.window)
        deviation = torch.where(filled, self.window - mean, torch.zeros_like(self.window))
        std = (deviation.square().sum() / (filled.sum() - 1)).sqrt()
        return (rewards - mean) / std.clamp(min=1e-3)


class TinyPolicy(nn.Module):
    def __init__(self, vocab=21, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.gru(self.embed(ids))[0])


def build():
    torch.manual_seed(64)
    model, scaler = TinyPolicy(), WindowRewardScaler()
    batches = []
    for step in range(3):
        n = 6
        rewards = torch.rand(n) * 2 - 0.5
        rewards[step] = float("nan")  # aborted: the sandbox was gone
        lengths = torch.randint(3, 10, (n, 1))
        batches.append({"ids": torch.randint(0, 21, (n, 10)), "mask": (torch.arange(9) < lengths).float(), "rewards": rewards})
    return SimpleNamespace(model=model, scaler=scaler, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batches)


def run(s=None):
    s = s or build()
    losses = []
    for batch in s.batch:
        keep = torch.isfinite(batch["rewards"]).nonzero().squeeze(-1)
        ids, mask, rewards = batch["ids"][keep], batch["mask"][keep], batch["rewards"][keep]
        advantages = s.scaler(rewards)
        s.scaler.push(rewards)
        log_probs = torch.log_softmax(s.model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(advantages[:, None] * log_probs * mask).sum() / mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

"""Dynamic sampling: groups of equal rewards make 0 / 0 advantages, and exactly those groups are filtered out before the loss.

The advantages carry no epsilon (Dr.-style clean z-scores), so a solved and an unsolved prompt give NaN rows. The DAPO filter keeps the groups
whose std is above 0 by boolean indexing, on tensors without a graph; the policy is run on the kept rows only. NaN is made and dropped: healthy.

Source: https://github.com/NovaSky-AI/SkyRL (skyrl_train/utils/trainer_utils.py, handle_filter_sampling; dynamic_sampling type "filter").
"""

from types import SimpleNamespace

import torch
from torch import nn


def group_advantages(rewards):
    mean = rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True)
    return (rewards - mean) / std, std.squeeze(1)


def handle_filter_sampling(sequences, response_mask, advantages, std, n_samples_per_prompt):
    kept_groups = std > 0
    kept_rows = kept_groups.repeat_interleave(n_samples_per_prompt)
    return sequences[kept_rows], response_mask[kept_rows], advantages[kept_groups].reshape(-1, 1)


def build():
    torch.manual_seed(14)
    model = nn.Sequential(nn.Embedding(15, 10), nn.Linear(10, 15))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rewards = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0]])
    sequences = torch.randint(0, 15, (16, 7))
    mask = (torch.arange(6) < torch.randint(3, 7, (16, 1))).float()
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"sequences": sequences, "response_mask": mask, "rewards": rewards})


def run(s=None):
    s = s or build()
    b = s.batch
    advantages, std = group_advantages(b["rewards"])
    sequences, mask, advantages = handle_filter_sampling(b["sequences"], b["response_mask"], advantages, std, 4)
    old = None
    for _ in range(3):
        logp = s.model(sequences[:, :-1]).log_softmax(-1).gather(-1, sequences[:, 1:].unsqueeze(-1)).squeeze(-1)
        old = logp.detach() if old is None else old
        ratio = (logp - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = (loss * mask).sum() / mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

"""Reward normalisation of slime's rollout manager by group index, after the dynamic filter left a group of one sample.

Aborted rollouts are dropped, so the groups are uneven; one prompt keeps a single sample. The sample standard deviation of one number is
NaN (0 degrees of freedom), the epsilon cannot mend it, and one NaN advantage is in the mean of the batch.

Source: https://github.com/THUDM/slime/pull/1918 (uneven rollout groups; normalising each group by itself is what it asks for).
Heals: std 1 (advantage 0) for groups below two, or leaving such samples out. Does not: a larger epsilon; unbiased=False also alters every other group.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,
    role=("rewards", "advantages"),
    fix=("guard_small_group", "drop_invalid_sample"),
    variable=("group_std",),
    line=("group_std = group.std()",),
)


class RolloutManager:
    def __init__(self, grpo_std_normalization=True):
        self.grpo_std_normalization = grpo_std_normalization

    def post_process_rewards(self, samples):
        members = defaultdict(list)
        for i, sample in enumerate(samples):
            members[sample["group_index"]].append(i)
        raw = torch.tensor([sample["reward"] for sample in samples])
        rewards = torch.empty_like(raw)
        for index in members.values():
            group = raw[index]
            centred = group - group.mean()
            if self.grpo_std_normalization:
                group_std = group.std()
                centred = centred / (group_std + 1e-6)
            rewards[index] = centred
        return rewards


def get_grpo_returns(rewards, response_lengths):
    return [torch.ones(n) * rewards[i] for i, n in enumerate(response_lengths)]


def build():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    groups, rewards = [0, 0, 0, 1, 2, 2], [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    samples = []
    for g, r in zip(groups, rewards):
        n = int(torch.randint(4, 8, ()))
        samples.append({"group_index": g, "reward": r, "tokens": torch.randint(0, 11, (n + 1,)), "response_length": n})
    return SimpleNamespace(model=model, optimizer=optimizer, batch=samples, manager=RolloutManager())


def run(s=None):
    s = s or build()
    rewards = s.manager.post_process_rewards(s.batch)
    lengths = [x["response_length"] for x in s.batch]
    advantages = torch.cat(get_grpo_returns(rewards, lengths))
    old = None
    for _ in range(2):
        rows = [s.model(x["tokens"][:-1]).log_softmax(-1).gather(-1, x["tokens"][1:, None])[:, 0] for x in s.batch]
        log_probs = torch.cat(rows)
        old = log_probs.detach() if old is None else old
        ratio = (log_probs - old).exp()
        pg_loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
        loss = torch.stack([part.mean() for part in pg_loss.split(lengths)]).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

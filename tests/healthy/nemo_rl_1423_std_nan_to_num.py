"""Leave-one-out baseline and std per prompt with square roots of negative numbers and 1/0, all replaced by 0; healthy.

E[x^2] - E[x]^2 is slightly negative for a group with equal rewards (sqrt: NaN) and the correction n / (n - 1) is 1/0 for a prompt
with one valid sample (0 * inf: NaN). nan_to_num(0) follows, without gradient, and a std of 0 means "do not scale".
Source: https://github.com/NVIDIA-NeMo/RL/pull/1423
"""

from types import SimpleNamespace

import torch
from torch import nn


@torch.no_grad()
def calculate_baseline_and_std_per_prompt(prompt_ids, rewards, valid_mask):
    baseline, std = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for p in prompt_ids.unique():
        rows = (prompt_ids == p).nonzero().squeeze(-1)
        valid = valid_mask[rows]
        num_valid = valid.sum()
        mean = (rewards[rows] * valid).sum() / num_valid
        mean_square = (rewards[rows].square() * valid).sum() / num_valid
        baseline[rows] = mean
        std[rows] = ((mean_square - mean.square()) * (num_valid / (num_valid - 1))).sqrt().nan_to_num(0)
    return baseline, std


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.embed(ids[:, :-1])).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(10)
    model = Policy()
    prompt_ids = torch.arange(4).repeat_interleave(4)
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.7, 0.7, 0.7, 0.7, 0.5, 0.0, 0.0, 0.0, 0.85, 0.85, 0.85, 0.85])
    valid_mask = torch.ones(16)
    valid_mask[9:12] = 0  # one valid sample for the third prompt
    valid_mask[15] = 0
    batch = dict(ids=torch.randint(0, 24, (16, 6)), prompt_ids=prompt_ids, rewards=rewards, valid_mask=valid_mask)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    baseline, std = calculate_baseline_and_std_per_prompt(b["prompt_ids"], b["rewards"], b["valid_mask"])
    advantages = b["rewards"] - baseline
    scale = std > 1e-3
    advantages[scale] = advantages[scale] / (std[scale] + 1e-6)
    sample_mask = b["valid_mask"].unsqueeze(-1)
    for _ in range(3):
        logprobs = s.model(b["ids"])
        ratios = torch.exp(logprobs - logprobs.detach())
        loss = -(ratios * advantages.unsqueeze(-1) * sample_mask).sum() / (sample_mask.sum() * logprobs.size(1))
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item(), advantages.abs().max().item(), all(p.isfinite().all().item() for p in s.model.parameters())


if __name__ == "__main__":
    print(run())

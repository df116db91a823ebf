"""Only one completion of a group got a reward, so the NaN-aware standard deviation applies Bessel's correction 1/(1-1) to it.
https://github.com/huggingface/trl/pull/5773
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single", "zero_denominator", "zero_div_zero"),
    op=("div", "mul"),
    index=(2,),
    masked=False,
    role=("advantages",),
    fix=("guard_small_group", "clamp_denominator"),
    variable=("bessel",),
    line=("bessel = count / (count - 1)",),
)


def nanstd(tensor, dim):
    valid = ~torch.isnan(tensor)
    count = valid.sum(dim)
    mean = torch.nansum(tensor, dim) / count
    centred = torch.where(valid, tensor - mean.unsqueeze(dim), 0.0)
    variance = centred.square().sum(dim) / count
    bessel = count / (count - 1)
    return torch.sqrt(variance * bessel)


def compute_advantages(rewards, num_generations):
    grouped = rewards.view(-1, num_generations)
    mean_grouped = torch.nanmean(grouped, dim=1).repeat_interleave(num_generations)
    std_rewards = nanstd(grouped, 1).repeat_interleave(num_generations)
    advantages = rewards - mean_grouped
    advantages = advantages / (std_rewards + 1e-4)
    unscored = torch.isnan(rewards)
    return torch.where(unscored, 0.0, advantages)


def build():
    torch.manual_seed(5773)
    model = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 13))
    prompt_completion_ids = torch.randint(0, 13, (12, 6))
    nan = float("nan")  # reward functions returned None for these
    rewards = torch.tensor([1.0, 0.0, nan, 0.5, 0.2, 0.9, 0.4, 0.4, nan, 0.7, nan, nan])
    batch = {"ids": prompt_completion_ids, "rewards": rewards, "num_generations": 4}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-6), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    advantages = compute_advantages(s.batch["rewards"], s.batch["num_generations"])
    logps = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    coef_1 = torch.exp(logps - logps.detach())
    loss = -(coef_1 * advantages.unsqueeze(1)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

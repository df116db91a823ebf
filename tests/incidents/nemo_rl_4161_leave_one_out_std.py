"""The leave-one-out std is sqrt(E[x^2] - E[x]^2) in fp32; for a 7-versus-1 split the difference rounds below zero and sqrt gives NaN.
https://github.com/NVIDIA-NeMo/RL/pull/4161
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(11,),
    masked=False,
    role=("advantages", "rewards"),
    fix=("clamp_input", "clamp_denominator"),
    variable=("std",),
    line=("std = (square_mean - baseline.square()).sqrt()",),
)


def calculate_baseline_and_std_per_prompt(prompts, rewards):
    same = (prompts[:, None] == prompts[None, :]).float()
    same.fill_diagonal_(0.0)  # leave one out
    num_valid = same.sum(1)
    baseline = (same @ rewards) / num_valid
    square_mean = (same @ rewards.square()) / num_valid
    std = (square_mean - baseline.square()).sqrt()
    return baseline, std


def compute_advantage(prompts, rewards, epsilon=1e-6):
    baseline, std = calculate_baseline_and_std_per_prompt(prompts, rewards)
    return (rewards - baseline) / (std + epsilon)


def build():
    torch.manual_seed(4161)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    rewards = torch.tensor([0.1, 0.6, 0.3, 0.8, 0.9, 0.2, 0.5, 0.7, 0.4, 0.4, 0.4, 0.0, 0.4, 0.4, 0.4, 0.4])
    prompts = torch.arange(2).repeat_interleave(8)
    batch = {"ids": torch.randint(0, 16, (16, 6)), "rewards": rewards, "prompts": prompts}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-6), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    advantages = compute_advantage(s.batch["prompts"], s.batch["rewards"]).unsqueeze(1)
    curr_logprobs = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratios = (curr_logprobs - curr_logprobs.detach()).exp()
    loss = -torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""A cosine schedule that divides by the number of updates, which is worked out from the length of a prompt set and the batch: with fewer prompts than
one batch it is 0, numpy makes NaN of 0 / 0 with a warning, and the learning rate is NaN from the first step on. Loss and gradients are fine.

The schedule is wrong, or the number of prompts: neither a clamp of the gradients nor another loss changes anything.
"""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("bad_input",),
    op=("input",),
    index=(0, 0),
    masked=None,
    role=("optimizer",),
    fix=("validate_config",),
    variable=(None,),
    line=("s.optimizer.step()",),
)


def cosine(step, total, peak=1e-3):
    return peak * 0.5 * (1 + np.cos(np.pi * np.float64(step) / np.float64(total)))


def build():
    torch.manual_seed(3)
    policy = nn.Sequential(nn.Embedding(16, 12), nn.Tanh(), nn.Linear(12, 16))
    prompts = torch.randint(0, 16, (6, 5))
    return SimpleNamespace(
        policy=policy, prompts=prompts, total=len(prompts) // 8, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    with np.errstate(invalid="ignore"):
        lr = cosine(0, s.total)
    for group in s.optimizer.param_groups:
        group["lr"] = lr
    log_probs = F.log_softmax(s.policy(s.prompts), dim=-1).gather(-1, s.prompts.unsqueeze(-1)).squeeze(-1)
    advantages = torch.linspace(-1.0, 1.0, len(s.prompts)).unsqueeze(1)
    loss = -(torch.exp(log_probs - log_probs.detach()) * advantages).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

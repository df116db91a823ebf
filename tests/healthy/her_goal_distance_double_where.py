"""A goal-conditioned model-based agent with hindsight relabelling: the relabelled goal IS the state reached, so the distance under
the root is exactly 0 in some rows. The root is guarded on both sides (a safe operand, then the result), as JAX/torch notes on
where() recommend; a relative distance is logged under no_grad and is 0/0 there.

    https://github.com/pytorch/pytorch/issues/23395
    https://github.com/openai/baselines/blob/master/baselines/her/her_sampler.py

Healthy: the NaN is in a logged number only; loss, gradients and weights are finite and right.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class GoalEncoder(nn.Module):
    def __init__(self, state_dim=6, dim=4, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state_dim, hidden), nn.ELU(), nn.Linear(hidden, dim))
        self.step_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.net(x)


def safe_norm(x):
    squared = x.pow(2).sum(-1)
    zero = squared == 0
    root = torch.where(zero, torch.ones_like(squared), squared).sqrt()
    return torch.where(zero, torch.zeros_like(squared), root)


def her_relabel(achieved, future, relabel):
    return torch.where(relabel.unsqueeze(-1), achieved, future)


def build():
    torch.manual_seed(26)
    model = GoalEncoder()
    states = torch.randn(9, 6)
    achieved = states + 0.2 * torch.randn(9, 6)
    relabel = torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 0], dtype=torch.bool)
    goals = her_relabel(achieved, torch.randn(9, 6), relabel)
    steps = torch.where(relabel, torch.zeros(9), torch.randint(1, 20, (9,)).float())
    return SimpleNamespace(
        model=model, achieved=achieved, goals=goals, steps=steps, log={}, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4)
    )


def run(s=None):
    s = s or build()
    delta = s.model(s.achieved) - s.model(s.goals)
    distance = safe_norm(delta)
    predicted = s.model.step_scale * distance
    loss = nn.functional.smooth_l1_loss(predicted, s.steps)
    with torch.no_grad():
        relative = (predicted - s.steps).abs() / s.steps
        s.log["relative_error"] = relative
        s.log["relative_error_mean"] = relative.mean()
        s.log["mean_direction"] = (delta / distance.unsqueeze(-1)).mean(0)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

"""A planner layer (shortest path on a predicted cost map) is differentiated by interpolation: its backward is the difference of two solver
calls divided by lambda. lambda is warmed up linearly and is 0 in the first step: the perturbed costs are the costs, the difference is 0,
and 0 / 0 makes the whole gradient of the cost map NaN.

Source: ShortestPath.backward in https://github.com/martius-lab/blackbox-backprop/blob/master/blackbox_backprop/shortest_path.py
Heals: start the warm-up above 0 (or refuse lambda <= 0, or floor the divisor). Clipping the gradient norm afterwards does not help.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 0, 0),
    masked=None,
    role=("grad", "hidden", "logits"),
    fix=(
        "validate_config",
        "clamp_denominator",
        "representable_eps",
        "avoid_singular_op",
        "skip_disabled_term",
        "fix_upstream",
        "skip_bad_step",
    ),
    variable=("gradient",),
    line=("gradient = -(suggested - better_paths) / ctx.lambda_val",),
)


def solve_grid(costs):
    """Cheapest monotone path (right or down) from top left to bottom right; indicator matrix."""
    n = costs.shape[0]
    table = [[0.0] * n for _ in range(n)]
    cost = costs.tolist()
    for i in range(n):
        for j in range(n):
            before = [table[i - 1][j]] if i else []
            before += [table[i][j - 1]] if j else []
            table[i][j] = cost[i][j] + (min(before) if before else 0.0)
    path = torch.zeros(n, n)
    i = j = n - 1
    path[i, j] = 1.0
    while i or j:
        if i and (not j or table[i - 1][j] <= table[i][j - 1]):
            i -= 1
        else:
            j -= 1
        path[i, j] = 1.0
    return path


class ShortestPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, lambda_val):
        suggested = torch.stack([solve_grid(w) for w in weights.detach()])
        ctx.save_for_backward(weights, suggested)
        ctx.lambda_val = lambda_val
        return suggested

    @staticmethod
    def backward(ctx, grad_output):
        weights, suggested = ctx.saved_tensors
        weights_prime = (weights + ctx.lambda_val * grad_output).clamp(min=0.0)
        better_paths = torch.stack([solve_grid(w) for w in weights_prime])
        gradient = -(suggested - better_paths) / ctx.lambda_val
        return gradient, None


class NeuroAlgorithmicPolicy(nn.Module):
    def __init__(self, grid=5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def forward(self, images, lambda_val):
        costs = self.encoder(images).squeeze(1).abs()
        return ShortestPath.apply(costs, lambda_val)


class LinearWarmup:
    def __init__(self, value, steps):
        self.value, self.steps, self.step_count = value, steps, 0

    def step(self):
        current = self.value * self.step_count / self.steps
        self.step_count += 1
        return current


def build():
    torch.manual_seed(1912)
    policy = NeuroAlgorithmicPolicy()
    images = torch.rand(6, 3, 5, 5)
    expert_paths = torch.stack([solve_grid(torch.rand(5, 5)) for _ in range(6)])
    return SimpleNamespace(
        model=policy,
        images=images,
        expert_paths=expert_paths,
        schedule=LinearWarmup(20.0, 100),
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    paths = s.model(s.images, s.schedule.step())
    errors = paths * (1.0 - s.expert_paths) + (1.0 - paths) * s.expert_paths
    loss = errors.mean(dim=0).sum()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss

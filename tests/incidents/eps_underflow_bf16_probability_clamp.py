"""A process reward model clamps probabilities to 1 - 1e-6 in bfloat16, which rounds to 1; log(1 - p) is -inf and its weight is 0."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "log_zero"),
    op=("log",),
    index=(3, 1),
    masked=False,
    role=("loss", "log_probs", "rewards"),
    fix=("upcast_fp32", "stable_function", "representable_eps", "clamp_input"),
    variable=("miss",),
    line=("miss = torch.log(1 - prob)",),
)


class StepJudge(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.verdict = nn.Linear(width, 1)

    def forward(self, steps):
        return torch.sigmoid(self.verdict(self.trunk(steps))).squeeze(-1)


def step_bce(prob, label, eps=1e-6):
    prob = prob.clamp(eps, 1 - eps)
    hit = torch.log(prob)
    miss = torch.log(1 - prob)
    return -(label * hit + (1 - label) * miss)


def build():
    torch.manual_seed(116)
    judge = StepJudge().to(torch.bfloat16)
    steps = torch.randn(5, 4, 12, dtype=torch.bfloat16)
    with torch.no_grad():
        h = judge.trunk(steps[3, 1])
        judge.verdict.weight[0] += 9.0 * h / h.float().square().sum().to(h.dtype)
    label = (torch.rand(5, 4) > 0.4).to(torch.bfloat16)
    label[3, 1] = 1.0
    step_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    batch = SimpleNamespace(steps=steps, label=label, step_mask=step_mask)
    return SimpleNamespace(model=judge, optimizer=torch.optim.SGD(judge.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    per_step = step_bce(s.model(b.steps), b.label)
    loss = per_step.masked_select(b.step_mask).float().mean()
    loss.backward()
    s.optimizer.step()
    return loss

"""The process reward model's cross entropy is written out with log(1 - p); a confident wrong step has p rounded to 1.0
and the log is -inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2, 1),
    masked=False,
    role=("loss", "log_probs"),
    fix=("stable_function", "clamp_input"),
    variable=("neg",),
    line=("neg = torch.log(1.0 - p)",),
)


class StepVerifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 1)

    def forward(self, steps):
        return self.fc2(torch.tanh(self.fc1(steps))).squeeze(-1)


def step_loss(score, label):
    p = torch.sigmoid(score)
    pos = torch.log(p)
    neg = torch.log(1.0 - p)
    return -(label * pos + (1 - label) * neg).mean()


def build():
    torch.manual_seed(88)
    model = StepVerifier()
    steps = 0.3 * torch.randn(3, 4, 4)
    with torch.no_grad():
        model.fc2.weight.mul_(40)
        model.fc2.bias.fill_(0.0)
        unusual = 5 * torch.randn(300, 4)
        steps[2, 1] = unusual[model(unusual).argmax()]
    label = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4), batch=(steps, label))


def run(s=None):
    s = s or build()
    steps, label = s.batch
    loss = step_loss(s.model(steps), label)
    loss.backward()
    s.optimizer.step()
    return loss

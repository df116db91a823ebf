"""Hellinger distillation takes the root of student probabilities; a very confident student has exact zeros there and
the slope is infinite.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(7, 3),
    masked=None,
    role=("loss", "kl", "log_probs", "logits"),
    fix=("clamp_input", "avoid_singular_op", "stable_function", "clamp_denominator", "representable_eps"),
    variable=("root_student",),
    line=("root_student = (student_logits / self.temperature).softmax(dim=-1).sqrt()",),
)


class SquaredHellinger(nn.Module):
    def __init__(self, temperature=1.0):
        super().__init__()
        self.temperature = temperature

    def forward(self, student_logits, teacher_probs):
        root_student = (student_logits / self.temperature).softmax(dim=-1).sqrt()
        root_teacher = teacher_probs.sqrt()
        return 0.5 * (root_student - root_teacher).square().sum(dim=-1)


def build():
    torch.manual_seed(103)
    student = nn.Sequential(nn.Linear(5, 12), nn.SiLU(), nn.Linear(12, 9))
    packed = torch.randn(11, 5)
    packed[7, 1] = 40.0  # an outlier feature: the student is certain about this token
    with torch.no_grad():
        student[0].weight[2, 1] = 1.5
        student[2].weight[3, 2] = -3.0
    teacher_probs = torch.randn(11, 9).softmax(-1)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    return SimpleNamespace(model=student, optimizer=optimizer, batch=(packed, teacher_probs), criterion=SquaredHellinger())


def run(s=None):
    s = s or build()
    packed, teacher_probs = s.batch
    loss = s.criterion(s.model(packed), teacher_probs=teacher_probs).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

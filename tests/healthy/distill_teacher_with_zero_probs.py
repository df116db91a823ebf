"""Distillation from a truncated teacher: its probabilities are exactly 0 outside the top tokens and kl_div treats 0 log 0 as 0."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY = "teacher probabilities that are exactly 0 in a Kullback-Leibler divergence"


def build():
    torch.manual_seed(316)
    student, teacher = nn.Linear(7, 20), nn.Linear(7, 20).requires_grad_(False)
    return SimpleNamespace(student=student, teacher=teacher, h=torch.randn(9, 7), opt=torch.optim.AdamW(student.parameters(), lr=5e-3))


def run(s=None):
    s = s or build()
    with torch.no_grad():
        t = s.teacher(s.h)
        low = t.topk(6, -1).values[:, -1:]
        target = t.masked_fill(t < low, -torch.inf).softmax(-1)
    for _ in range(4):
        loss = F.kl_div(s.student(s.h).log_softmax(-1), target, reduction="batchmean")
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

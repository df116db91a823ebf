"""Both teacher and student fill the padded vocabulary columns with -inf, and the divergence subtracts one -inf log-prob from the other."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_minus_inf",),
    op=("sub",),
    index=(0, 19),
    masked=False,
    role=("kl", "log_ratio", "loss"),
    fix=("finite_mask_fill", "mask_before_op", "stable_function"),
    variable=("log_ratio",),
    line=("log_ratio = teacher_logps - student_logps",),
)


class FusedLinearDistillation(nn.Module):
    def __init__(self, real_vocab, beta=0.3, chunk_size=4, temperature=1.0):
        super().__init__()
        self.real_vocab = real_vocab
        self.beta = beta
        self.chunk_size = chunk_size
        self.temperature = temperature

    def chunk_forward(self, hidden, weight):
        logits = hidden @ weight.t()
        pad_columns = torch.arange(weight.shape[0]) >= self.real_vocab
        logits = logits.masked_fill(pad_columns, float("-inf"))
        return F.log_softmax(logits / self.temperature, dim=-1)

    def distillation_loss_fn(self, student_logps, teacher_logps):
        log_ratio = teacher_logps - student_logps
        forward_kl = (teacher_logps.exp() * log_ratio).sum(-1)
        reverse_kl = (-student_logps.exp() * log_ratio).sum(-1)
        return self.beta * forward_kl + (1 - self.beta) * reverse_kl

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, loss_mask):
        total = student_input.new_zeros(())
        for start in range(0, student_input.shape[0], self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            student_logps = self.chunk_forward(student_input[rows], student_weight)
            with torch.no_grad():
                teacher_logps = self.chunk_forward(teacher_input[rows], teacher_weight)
            total = total + (self.distillation_loss_fn(student_logps, teacher_logps) * loss_mask[rows]).sum()
        return total / loss_mask.sum().clamp(min=1)


class Student(nn.Module):
    def __init__(self, dim=8, padded_vocab=24):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, padded_vocab, bias=False)


def build():
    torch.manual_seed(110)
    student = Student()
    loss_mask = torch.ones(10)
    loss_mask[2] = 0
    batch = {
        "hidden": torch.randn(10, 8),
        "teacher_input": torch.randn(10, 12),
        "teacher_weight": torch.randn(24, 12) * 0.3,
        "loss_mask": loss_mask,
    }
    return SimpleNamespace(
        model=student, optimizer=torch.optim.AdamW(student.parameters(), lr=1e-4), batch=batch, loss_fn=FusedLinearDistillation(19)
    )


def run(s=None):
    s = s or build()
    b = s.batch
    student_input = F.gelu(s.model.proj(b["hidden"]))
    loss = s.loss_fn(student_input, s.model.lm_head.weight, b["teacher_input"], b["teacher_weight"], b["loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

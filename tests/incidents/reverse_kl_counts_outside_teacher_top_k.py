"""Reverse KL of a student to a teacher whose logits were cut to its top k: sum p_s (log p_s - log p_t) over the whole vocabulary.

Source: the usual way to distil with a truncated teacher (`logits.topk(k)`, the others filled with -inf) is a forward KL, where the teacher's
0 weighs what it left out. The other way round the student's probability weighs an infinite log-ratio: every token's KL is +inf, the padded
ones become NaN in the product with the mask, and so the loss is NaN. No mask of tokens is to blame: it is the same without padding.
Heals: leaving out of the sum what the teacher left out. Tempting and useless: a where on the mask, which the tokens that count pass.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("bad_input", "inf_minus_inf", "plogp_zero"),
    op=("masked_fill",),
    index=(0, 0, 0),
    masked=False,
    role=("logits",),
    fix=("stable_function",),
    variable=("teacher_logits",),
    line=('teacher_logits = teacher_logits.masked_fill(teacher_logits < lowest, float("-inf"))',),
)


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def build():
    torch.manual_seed(12)
    student, teacher = Policy(), Policy(dim=16).requires_grad_(False)
    mask = torch.ones(3, 9)
    mask[0, 6:] = 0
    mask[2, 7:] = 0
    return SimpleNamespace(
        student=student,
        teacher=teacher,
        optimizer=torch.optim.AdamW(student.parameters(), lr=1e-4),
        ids=torch.randint(0, 24, (3, 9)),
        mask=mask,
        top_k=8,
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        teacher_logits = s.teacher(s.ids)
        lowest = teacher_logits.topk(s.top_k, dim=-1).values[..., -1:]
        teacher_logits = teacher_logits.masked_fill(teacher_logits < lowest, float("-inf"))
    teacher_logps = F.log_softmax(teacher_logits, dim=-1)
    student_logps = F.log_softmax(s.student(s.ids), dim=-1)
    kl = (student_logps.exp() * (student_logps - teacher_logps)).sum(-1)
    loss = (kl * s.mask).sum() / s.mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

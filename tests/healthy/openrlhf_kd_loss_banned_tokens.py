"""OpenRLHF's KDLoss multiplies the teacher's probabilities by the student's log-probabilities and blanks the places where the student's
logits are infinite.

The student's bad-words processor sets three logits to -inf, so the product holds -inf, and NaN where the teacher's probability is 0 as well.
masked_fill takes those out, and as the teacher needs no gradient, backward sends an exact 0 into them. Loss and gradients are finite and
right.

Source: https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/models/loss.py (KDLoss)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

BANNED = [3, 17, 30]


class Student(nn.Module):
    def __init__(self, vocab=32, dim=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.proj = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab)
        self.register_buffer("banned", torch.zeros(vocab, dtype=torch.bool))
        self.banned[BANNED] = True

    def forward(self, ids):
        logits = self.lm_head(torch.tanh(self.proj(self.embed_tokens(ids))))
        return logits.masked_fill(self.banned, float("-inf"))


class KDLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.IGNORE_INDEX = -100

    def forward(self, logits, teacher_logits, label):
        teacher_probs = F.softmax(teacher_logits, dim=-1, dtype=torch.float32)
        inf_mask = torch.isinf(logits)
        logprobs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        prod_probs = torch.masked_fill(teacher_probs * logprobs, inf_mask, 0)
        x = torch.sum(prod_probs, dim=-1).view(-1)
        mask = (label != self.IGNORE_INDEX).int()
        return -torch.sum(x * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


def build():
    torch.manual_seed(2152)
    student = Student()
    ids = torch.randint(4, 16, (3, 8))
    labels = torch.randint(4, 16, (3, 8))
    labels[:, :2] = -100
    teacher_logits = torch.randn(3, 8, 32) * 2
    teacher_logits[..., 17] = -200.0  # the teacher gives it no probability at all
    return SimpleNamespace(
        model=student,
        student=student,
        ids=ids,
        labels=labels,
        teacher_logits=teacher_logits,
        loss_fn=KDLoss(),
        optimizer=torch.optim.AdamW(student.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    logits = s.student(s.ids)
    distil_loss = s.loss_fn(logits, s.teacher_logits, s.labels)
    gpt_loss = F.cross_entropy(logits.view(-1, 32), s.labels.view(-1), ignore_index=-100)
    loss = gpt_loss * 0.6 + distil_loss * 0.4
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

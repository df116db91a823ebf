"""SDPO, top-k self-distillation with a tail bucket where the student is certain - healthy.

For a certain student the top-k mass rounds to 1 (logsumexp 0 or a little above), log(1 - 1) would be -inf; the clamp at -1e-7 comes before expm1 and stops the
gradient there, so tail (about -16) and gradients are finite. Padding rows of the teacher are filled with a finite -1e4 and left out by indexing. The entropy logged of an
empty micro-batch is NaN and only logged. (Source: the _add_tail_bucket of SDPO's actor and of TRL's distillation trainers.)
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F


class Student(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.proj = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + torch.tanh(self.proj(hidden)))


def add_tail_bucket(log_probs):
    log_s = torch.logsumexp(log_probs, dim=-1, keepdim=True)
    log_s = torch.clamp(log_s, max=-1e-7)
    tail_log = torch.log(-torch.expm1(log_s))
    return torch.cat([log_probs, tail_log], dim=-1)


def build():
    torch.manual_seed(6)
    student, teacher = Student(), Student()
    with torch.no_grad():
        student.lm_head.weight.mul_(30)
    input_ids = torch.randint(0, 20, (3, 7))
    response_mask = torch.ones(3, 7, dtype=torch.bool)
    response_mask[1, 5:] = False
    return SimpleNamespace(
        model=student,
        teacher=teacher,
        optimizer=torch.optim.AdamW(student.parameters(), lr=1e-3),
        input_ids=input_ids,
        response_mask=response_mask,
        metrics={},
    )


def run(s=None):
    s = s or build()
    for step in range(3):
        student_log_probs = F.log_softmax(s.model(s.input_ids), dim=-1)
        student_topk, idx = student_log_probs.topk(4, dim=-1)
        with torch.no_grad():
            teacher_topk = F.log_softmax(s.teacher(s.input_ids), dim=-1).gather(-1, idx)
            teacher_topk = teacher_topk.masked_fill(~s.response_mask.unsqueeze(-1), -1e4)
        student_dist = add_tail_bucket(student_topk)
        teacher_dist = add_tail_bucket(teacher_topk)
        kl = (student_dist.exp() * (student_dist - teacher_dist)).sum(-1)
        loss = kl[s.response_mask].sum() / s.response_mask.sum()
        with torch.no_grad():
            truncated = ~s.response_mask[0]
            s.metrics["kl_of_truncated"] = kl[0][truncated].mean().item()
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

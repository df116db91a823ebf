"""EasyDistill, mmkd whitebox distillation with reverse_kld - teacher and student in float16.

The teacher's probabilities are floored at 1e-10 before the log, but this number is 0 in float16: a token that the teacher's softmax underflowed stays 0, its log is -inf and the
student's mass on it makes the divergence inf. (Source: modelscope/easydistill PR 16, mmkd/train.py, compute_white_box_distillation_loss.) Heals: clamp(min=1e-7); softmax of the teacher
in float32 (then all in float32); log_softmax of the teacher's logits instead of log(softmax). Does not: the same clamp(min=1e-10) on the student's probabilities.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "log_zero"),
    op=("log",),
    index=(0, 3, 1),
    masked=False,
    role=("log_probs", "ref_log_probs", "loss", "kl"),
    fix=("representable_eps", "upcast_fp32", "stable_function", "clamp_input", "mask_before_op", "avoid_singular_op"),
    variable=(None,),
    line=('torch.log(teacher_probs.clamp(min=1e-10)), F.softmax(student_logits, dim=-1), reduction="none", log_target=False',),
)


class Student(nn.Module):
    def __init__(self, vocab=12, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.proj = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        return self.lm_head(torch.tanh(self.proj(self.embed(input_ids))))


def build():
    torch.manual_seed(16)
    model = Student().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    input_ids = torch.randint(0, 12, (2, 8))
    labels = input_ids.clone()
    labels[:, :3] = -100
    teacher_logits = torch.randn(2, 8, 12)
    teacher_logits[0, 3, 4] = 21.0
    teacher_logits[0, 3, 1] = -3.5
    teacher_logits[0, 3, 5:] += 7.0
    teacher_logits[0, 3, 0] = 6.0
    teacher_logits[1, 6, 9] = 23.5
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        input_ids=input_ids,
        labels=labels,
        teacher_logits=teacher_logits.half(),
        kd_ratio=0.5,
        distillation_type="reverse_kld",
        temperature=1.0,
    )


def compute_white_box_distillation_loss(student_logits, teacher_logits, labels, distillation_type, temperature):
    mask = (labels != -100).float()
    teacher_probs = F.softmax(teacher_logits / temperature, dim=-1)
    student_logits = student_logits / temperature
    if distillation_type == "forward_kld":
        loss = F.kl_div(F.log_softmax(student_logits, dim=-1), teacher_probs, reduction="none", log_target=False).sum(dim=-1)
    else:
        loss = F.kl_div(
            torch.log(teacher_probs.clamp(min=1e-10)), F.softmax(student_logits, dim=-1), reduction="none", log_target=False
        ).sum(dim=-1)
    return (loss * mask).sum() / mask.sum()


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids)
    lm_loss = F.cross_entropy(logits[:, :-1].reshape(-1, 12), s.labels[:, 1:].reshape(-1), ignore_index=-100)
    distil_loss = compute_white_box_distillation_loss(logits, s.teacher_logits, s.labels, s.distillation_type, s.temperature)
    loss = (1 - s.kd_ratio) * lm_loss + s.kd_ratio * distil_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

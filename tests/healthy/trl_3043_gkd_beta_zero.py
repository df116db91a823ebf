"""TRL #3043 (https://github.com/huggingface/trl/pull/3043): the generalised JSD of GKD at its edge, beta = 0.

log(beta) is -inf, so the teacher's side of the mixture is -inf for every token; logsumexp absorbs it and the mixture is the student itself.
By definition the divergence is then 0 and so is its gradient; the cross-entropy beside it trains as usual. Loss, gradients and weights are finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class Student(nn.Module):
    def __init__(self, vocab=19, hidden=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.fc = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, input_ids):
        return self.lm_head(F.silu(self.fc(self.embed(input_ids))))


def generalized_jsd_loss(student_logits, teacher_logits, labels, beta, temperature=1.0):
    student_log_probs = F.log_softmax(student_logits / temperature, dim=-1)
    teacher_log_probs = F.log_softmax(teacher_logits / temperature, dim=-1)
    beta = torch.tensor(beta, dtype=student_log_probs.dtype)
    mixture_log_probs = torch.logsumexp(torch.stack([student_log_probs + torch.log1p(-beta), teacher_log_probs + torch.log(beta)]), dim=0)
    kl_teacher = F.kl_div(mixture_log_probs, teacher_log_probs, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture_log_probs, student_log_probs, reduction="none", log_target=True)
    jsd = beta * kl_teacher + (1 - beta) * kl_student
    mask = labels != -100
    return jsd[mask].sum() / mask.sum()


def build():
    torch.manual_seed(510)
    student, teacher = Student(), Student(hidden=14)
    input_ids = torch.randint(0, 19, (3, 9))
    labels = input_ids.roll(-1, 1)
    labels[:, :2] = -100
    labels[:, -1] = -100
    return SimpleNamespace(
        model=student,
        teacher=teacher.requires_grad_(False),
        input_ids=input_ids,
        labels=labels,
        beta=0.0,
        optimizer=torch.optim.AdamW(student.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    for _ in range(3):
        student_logits = s.model(s.input_ids)
        teacher_logits = s.teacher(s.input_ids)
        jsd = generalized_jsd_loss(student_logits, teacher_logits, s.labels, s.beta)
        sft_loss = F.cross_entropy(student_logits.flatten(0, 1), s.labels.flatten(), ignore_index=-100)
        loss = jsd + 0.1 * sft_loss
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

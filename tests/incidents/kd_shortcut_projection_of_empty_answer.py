"""Distillation with a penalty on the student's projection onto "shortcut" directions of the hidden space.

Answers are mean-pooled with their mask (count clamped to 1). A sample whose answer was truncated away pools to the zero vector; normalising keeps it zero, and the norm of its
projection is written as pow(2).sum().sqrt(). The loss is finite, but the slope of sqrt at 0 is infinite and meets the zero slope of the square: NaN in all gradients.
Source: a distillation loss with proj_norm = proj.pow(2).sum(dim=-1).sqrt() (stored file 59774801554, which names no repository; beside its VanillaKDLoss)
Heals: an epsilon under the root, torch.linalg.vector_norm, dropping samples without an answer.  Does not: clamping the count (there already), F.normalize's eps.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(2,),
    masked=None,
    role=("hidden", "loss"),
    fix=("clamp_input", "stable_function", "where_on_detached", "drop_invalid_sample", "guard_empty", "avoid_singular_op"),
    variable=("proj_norm",),
    line=("proj_norm = proj.pow(2).sum(dim=-1).sqrt()",),
)


class ShortcutSuppressionLoss(nn.Module):
    def __init__(self, shortcut_dirs):
        super().__init__()
        self.register_buffer("shortcut_dirs", F.normalize(shortcut_dirs, dim=0))

    def forward(self, h_student):
        h_s = F.normalize(h_student, dim=-1)
        proj = h_s @ self.shortcut_dirs
        proj_norm = proj.pow(2).sum(dim=-1).sqrt()
        return proj_norm.mean()


class Student(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.rnn(self.embed(ids))[0]
        return h, self.head(h)


def pool_answer(h, answer_mask):
    m = answer_mask[..., None]
    return (h * m).sum(1) / m.sum(1).clamp(min=1)


def build():
    torch.manual_seed(9)
    model = Student()
    ids = torch.randint(0, 30, (4, 10))
    answer_mask = torch.zeros(4, 10)
    for row, start in enumerate((4, 6, 10, 3)):  # the prompt of sample 2 fills the context
        answer_mask[row, start:] = 1
    batch = {"input_ids": ids, "answer_mask": answer_mask, "teacher_logits": torch.randn(4, 10, 30)}
    return SimpleNamespace(
        model=model,
        penalty=ShortcutSuppressionLoss(torch.randn(16, 3)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch=batch,
    )


def run(s=None):
    s = s or build()
    mask = s.batch["answer_mask"]
    for _ in range(2):
        h, logits = s.model(s.batch["input_ids"])
        kd = F.kl_div(logits.log_softmax(-1), s.batch["teacher_logits"].log_softmax(-1), log_target=True, reduction="none").sum(-1)
        loss = (kd * mask).sum() / mask.sum() + 0.1 * s.penalty(pool_answer(h, mask))
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

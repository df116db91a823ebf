"""TRL #4765 / #5905 - GOLD's universal logit distillation merges the tokens of an alignment group by softmax(log p0 + log p1).

The probabilities come out of a softmax; an entry far below the best one underflows to exactly 0 and its logarithm is -inf. The merged
row and the loss are finite, but backward divides the zero gradient of that entry by its probability 0, and the student's row of logits
gets NaN. Sources: https://github.com/huggingface/trl/pull/4765 , https://github.com/huggingface/trl/pull/5905
(trl/experimental/gold/gold_trainer.py). log_softmax of the logits or a floor under the probabilities heals; cleaning the merged
row or the loss with nan_to_num does not, since both are finite already.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("log_zero",),
    op=("log",),
    index=(9,),
    masked=None,
    role=("log_probs", "logits"),
    fix=("stable_function", "clamp_input", "mask_before_op", "avoid_singular_op"),
    variable=("log_p",),
    line=("log_p = torch.log(probs[group[0]])",),
)


class Student(nn.Module):
    def __init__(self, vocab=12, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def merge_probabilities(probs, groups):
    merged = []
    for group in groups:
        if len(group) == 1:
            merged.append(probs[group[0]])
            continue
        log_p = torch.log(probs[group[0]])
        for i in group[1:]:
            log_p = log_p + torch.log(probs[i])
        merged.append(torch.softmax(log_p, dim=-1))
    return torch.stack(merged)


def uld_loss(student_probs, teacher_probs):
    s = student_probs.sort(dim=-1, descending=True).values
    t = teacher_probs.sort(dim=-1, descending=True).values
    return (s - t).abs().sum(-1).mean()


def build():
    torch.manual_seed(4765)
    student = Student()
    with torch.no_grad():
        student.embed.weight[4] = 0.0
        student.embed.weight[4, 0] = 30.0
        student.lm_head.weight[9, 0] = -4.0  # after token 4 the student is sure that 9 does not follow
    ids = torch.tensor([1, 3, 4, 7, 2])
    teacher_probs = torch.randn(4, 12).softmax(-1)
    return SimpleNamespace(
        model=student,
        optimizer=torch.optim.AdamW(student.parameters(), lr=1e-3),
        ids=ids,
        student_groups=[[0], [1], [2, 3], [4]],
        teacher_probs=teacher_probs,
    )


def run(s=None):
    s = s or build()
    probs = s.model(s.ids).softmax(dim=-1)
    loss = uld_loss(merge_probabilities(probs, s.student_groups), s.teacher_probs)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""Optimal-transport distillation (MultiLevel-OT and its copies): a Sinkhorn loss between the token distributions of student and teacher.

K = exp(-W / epsilon) is made from the L1 distances of the softened distributions and its rows and columns are normalised in turn. The distances are
at most 2, so epsilon = 0.1 is harmless; here it was lowered to 0.01 for a "sharper" plan. One position of the student is sure of a token that no
teacher position predicts: all its distances are above 1.04, its whole row of K underflows to 0, and 0 / 0 in the first row normalisation is NaN. The
next column normalisation spreads it over the plan.
Source: https://github.com/2018cx/Multi-Level-OT and its copies (class Sinkhorn: sinkhorn_normalized, sinkhorn_loss with epsilon=0.1).
Heals: the log-domain Sinkhorn (logsumexp), a floor under the exponent. Does not: a floor under the row sum (the forward is finite then, but every
iteration multiplies the gradient of the empty row by its inverse, ten of them are beyond float32), nan_to_num of the loss, clipping, upcasting.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(5, 0),
    masked=False,
    role=("hidden", "loss"),
    fix=("stable_function", "clamp_exponent", "validate_config", "clamp_input"),
    variable=("x",),
    line=("x = x / torch.sum(x, dim=1, keepdim=True)",),
)


class Sinkhorn(nn.Module):
    def __init__(self, T=2.0, epsilon=0.01):
        super().__init__()
        self.T, self.epsilon = T, epsilon

    def sinkhorn_normalized(self, x, n_iters=10):
        for _ in range(n_iters):
            x = x / torch.sum(x, dim=1, keepdim=True)
            x = x / torch.sum(x, dim=0, keepdim=True)
        return x

    def sinkhorn_loss(self, p_s, p_t):
        Wxy = torch.cdist(p_s, p_t, p=1)
        K = torch.exp(-Wxy / self.epsilon)
        P = self.sinkhorn_normalized(K)
        return torch.sum(P * Wxy)

    def forward(self, y_s, y_t):
        p_s = F.softmax(y_s / self.T, dim=-1)
        p_t = F.softmax(y_t / self.T, dim=-1)
        return 0.001 * self.sinkhorn_loss(p_s, p_t)


class Student(nn.Module):
    def __init__(self, vocab=24, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def build():
    torch.manual_seed(11)
    student = Student()
    ids = torch.tensor([1, 2, 3, 4, 6, 9, 7, 8])
    with torch.no_grad():
        # a student that has learned: every token is followed by its successor, with some doubt
        student.embed.weight.copy_(2.0 * torch.eye(24) + 0.1 * torch.randn(24, 24))
        student.head.weight.copy_(8.0 * torch.eye(24).roll(1, 0) + 0.2 * torch.randn(24, 24))
        teacher_logits = student(ids) + 0.1 * torch.randn(8, 24)
        teacher_logits[5] = teacher_logits[4] + 0.1 * torch.randn(24)  # the teacher sees another continuation here
    labels = torch.tensor([2, 3, 4, 6, 9, 7, 8, 1])
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    return SimpleNamespace(
        model=student, optimizer=optimizer, kd=Sinkhorn(), batch=dict(ids=ids, labels=labels, teacher_logits=teacher_logits)
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        logits = s.model(s.batch["ids"])
        ce = F.cross_entropy(logits, s.batch["labels"])
        loss = ce + s.kd(logits, s.batch["teacher_logits"])
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

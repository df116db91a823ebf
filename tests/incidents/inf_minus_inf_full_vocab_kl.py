"""The exact KL over the vocabulary subtracts student and teacher log-probs; both are -inf on unused vocabulary rows,
and p = 0 does not cancel NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_minus_inf",),
    op=("sub",),
    index=(0, 0, 9),
    masked=False,
    role=("log_ratio", "kl"),
    fix=("finite_mask_fill", "mask_before_op"),
    variable=(None,),
    line=("return (s.exp() * (s - t)).sum(-1)",),
)

REAL_VOCAB = 13


class Student(nn.Module):
    def __init__(self, padded=16, dim=7):
        super().__init__()
        self.emb = nn.Embedding(padded, dim)
        self.up = nn.Linear(dim, padded)

    def forward(self, x):
        logits = self.up(self.emb(x))
        return mask_unused(logits)


def mask_unused(logits):
    out = logits.clone()
    out[..., REAL_VOCAB:] = -torch.inf
    out[..., 9] = -torch.inf  # reserved special token
    return out


def exact_kl(student_logits, teacher_logits):
    s = student_logits.log_softmax(dim=-1)
    t = teacher_logits.log_softmax(dim=-1)
    return (s.exp() * (s - t)).sum(-1)


def build():
    torch.manual_seed(717)
    model = Student()
    pool = torch.tensor([i for i in range(REAL_VOCAB) if i != 9])
    x = pool[torch.randint(0, len(pool), (2, 5))]
    teacher_logits = mask_unused(torch.randn(2, 5, 16) * 2)
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=(x, teacher_logits))


def run(s=None):
    s = s or build()
    x, teacher_logits = s.batch
    loss = exact_kl(s.model(x), teacher_logits).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""Reverse KL passes the student's probabilities as the kl_div target; at temperature 0.05 some are exactly 0 and their gradient is 0/0.
https://github.com/MakazhanAlpamys/Soup/issues/719
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("plogp_zero", "zero_div_zero", "log_zero"),
    op=("div", "xlogy"),
    index=(0, 5),
    masked=False,
    role=("kl",),
    fix=("stable_function",),
    variable=(None,),
    line=('term = F.kl_div(F.log_softmax(t, dim=-1), F.softmax(s, dim=-1), reduction="none").sum(-1)',),
)


class Net(nn.Module):
    def __init__(self, vocab=12, dim=6):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.tok(ids))


def compute_distill_term(student_logits, teacher_logits, mask, divergence="reverse_kl", temperature=0.05):
    s = student_logits[:, :-1] / temperature
    t = teacher_logits[:, :-1] / temperature
    keep = mask[:, 1:].bool()
    s, t = s[keep], t[keep]
    if divergence == "reverse_kl":
        term = F.kl_div(F.log_softmax(t, dim=-1), F.softmax(s, dim=-1), reduction="none").sum(-1)
    else:
        term = F.kl_div(F.log_softmax(s, dim=-1), F.softmax(t, dim=-1), reduction="none").sum(-1)
    return term.mean() * temperature**2


def build():
    torch.manual_seed(719)
    student, teacher = Net(), Net()
    teacher.requires_grad_(False)
    with torch.no_grad():
        student.head.bias[5] = -9.0  # -180 after the temperature
        student.head.bias[2] = 4.0
    ids = torch.randint(0, 12, (2, 7))
    mask = torch.ones(2, 7)
    mask[:, :3] = 0
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    return SimpleNamespace(model=student, teacher=teacher, optimizer=optimizer, batch={"input_ids": ids, "loss_mask": mask})


def run(s=None):
    s = s or build()
    ids = s.batch["input_ids"]
    with torch.no_grad():
        teacher_logits = s.teacher(ids)
    loss = compute_distill_term(s.model(ids), teacher_logits, s.batch["loss_mask"])
    loss.backward()
    s.optimizer.step()
    return loss

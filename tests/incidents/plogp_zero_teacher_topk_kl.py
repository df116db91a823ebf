"""The distillation target keeps the teacher's top-k and sets the rest to probability 0; the hand-written p * (log p -
log q) is then 0 * -inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "log_zero"),
    op=("log", "mul"),
    index=(0, 0, 1),
    masked=None,  # the top-k of a teacher is no mask of the loss, and yet it selects
    role=("kl",),
    fix=("stable_function", "clamp_input"),
    variable=(None,),
    line=("cell = target * (torch.log(target) - q)",),
)


class StudentLM(nn.Module):
    def __init__(self, vocab=11, dim=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.out(torch.tanh(self.emb(x)))


def truncate(teacher_logits, k):
    p = teacher_logits.softmax(-1)
    keep = torch.zeros_like(p).scatter_(-1, p.topk(k, dim=-1).indices, 1.0)
    p = p * keep
    return p / p.sum(-1, keepdim=True)


def forward_kl(target, student_logits):
    q = torch.log_softmax(student_logits, dim=-1)
    cell = target * (torch.log(target) - q)
    return cell.sum(-1)


def build():
    torch.manual_seed(1066)
    model = StudentLM()
    x = torch.randint(0, 11, (2, 4))
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=dict(x=x, teacher=torch.randn(2, 4, 11) * 3, top_k=4)
    )


def run(s=None):
    s = s or build()
    target = truncate(s.batch["teacher"], s.batch["top_k"])
    loss = forward_kl(target, s.model(s.batch["x"])).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""DSKD, adaptive KL - the head and tail weights are g_head / (g_head + g_tail); a padding position has no gap at all.

Self-distillation starts with a student that is a copy of its teacher; only real tokens see the teacher's extra context, so on padding both
distributions agree bit for bit: both gaps are 0 and the weight is 0/0. masked_fill drops the NaN from the loss, but backward multiplies
the zero gradient with the NaN weight. Source: songmzhang/DSKD, code/criterions/various_divergence.py, compute_adaptive_kl_divergence.
Heals: a floor under g_head + g_tail; leaving the padding out before the product. Does not: masked_fill / nan_to_num of the result.
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "zero_div_zero", "nan_times_zero_mask"),
    op=("div",),
    index=(0, 5),
    masked=True,
    role=("kl", "loss", "is_weight"),
    fix=("clamp_denominator", "mask_before_op", "where_on_detached", "guard_empty", "representable_eps"),
    variable=("w_head",),
    line=("w_head = g_head / (g_head + g_tail)",),
)
PAD = -100


class Reader(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.body = nn.Sequential(nn.Linear(dim, dim), nn.GELU())
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids, context=None):
        x = self.embed(ids)
        if context is not None:
            x = x + context
        return self.lm_head(self.body(x))


def adaptive_kl(logits, teacher_logits, target, alpha=0.5):
    lprobs = logits.log_softmax(-1)
    probs = lprobs.exp()
    teacher_lprobs = teacher_logits.log_softmax(-1)
    teacher_probs = teacher_lprobs.exp()
    sorted_teacher_probs, order = teacher_probs.sort(-1)
    sorted_probs = probs.gather(-1, order)
    gap = (sorted_teacher_probs - sorted_probs).abs()
    tail_mask = sorted_teacher_probs.cumsum(-1).lt(alpha).float()
    g_head = (gap * (1 - tail_mask)).sum(-1).detach()
    g_tail = (gap * tail_mask).sum(-1).detach()
    fkl = (teacher_probs * (teacher_lprobs - lprobs)).sum(-1)
    rkl = (probs * (lprobs - teacher_lprobs)).sum(-1)
    w_head = g_head / (g_head + g_tail)
    akl = w_head * fkl + (1 - w_head) * rkl
    pad_mask = target.eq(PAD)
    akl = akl.masked_fill(pad_mask, 0.0)
    return akl.sum() / (~pad_mask).sum()


def build():
    torch.manual_seed(32)
    student = Reader()
    teacher = copy.deepcopy(student).eval()
    lengths = torch.tensor([5, 8, 6])
    attention = torch.arange(8)[None, :] < lengths[:, None]
    ids = torch.randint(1, 20, (3, 8)).masked_fill(~attention, 0)
    target = torch.randint(1, 20, (3, 8)).masked_fill(~attention, PAD)
    context = 0.3 * torch.randn(3, 8, 12) * attention.unsqueeze(-1)
    return SimpleNamespace(
        model=student, teacher=teacher, ids=ids, target=target, context=context, optimizer=torch.optim.AdamW(student.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.ids)
    with torch.no_grad():
        teacher_logits = s.teacher(s.ids, s.context)
    loss = adaptive_kl(logits, teacher_logits, s.target)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

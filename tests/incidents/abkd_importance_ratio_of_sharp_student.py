"""Adaptive alpha-divergence distillation (AlphaNet, in ABKD f_divergence) at alpha = 1: the ratio teacher / student is taken of probabilities.

The surrogate loss weighs the student's log-probs with q * rho_f where rho_f is p / q, all detached. For a token that the student has given up (probability below the smallest float32 number,
so exactly 0) the ratio is p / 0 = inf and q * inf = 0 * inf = NaN. The true product q * (p / q) is p, at most 1. Only the branch of general alpha has the clamp iw_clip.

Source: https://github.com/ghwang-s/abkd/blob/main/distillation_llm/distillm/losses.py (f_divergence), facebookresearch/AlphaNet
Heals: the ratio from log-probs with the product taken before the exponential, a floor under q in the denominator, a clamp of the ratio at a huge finite number (all of it is detached).
Does not: the mask of infinite logits (they are finite), clipping gradients, clamping log-probs of the loss afterwards.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "inf_times_zero_coef"),
    op=("div",),
    index=(1, 4, 17),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_denominator", "stable_function", "clamp_input", "avoid_singular_op", "where_on_detached"),
    variable=("importance_ratio",),
    line=("importance_ratio = p_prob / q_prob",),
)


class Student(nn.Module):
    def __init__(self, vocab=26, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def f_divergence(q_logits, p_logits, alpha, iw_clip=1e3):
    q_prob = torch.softmax(q_logits, dim=-1).detach()
    p_prob = torch.softmax(p_logits, dim=-1).detach()
    q_log_prob = torch.log_softmax(q_logits, dim=-1)  # the gradient goes through here only

    importance_ratio = p_prob / q_prob
    if abs(alpha - 1.0) < 1e-3:
        rho_f = importance_ratio
    else:
        iw_alpha = torch.pow(importance_ratio, alpha).clamp(0, iw_clip)
        rho_f = iw_alpha / alpha + 1.0 / alpha / (alpha - 1.0)
    return -torch.sum(q_prob * rho_f * q_log_prob, dim=-1)


def build():
    torch.manual_seed(8)
    student = Student()
    ids = torch.randint(0, 25, (2, 7))
    ids[1, 4] = 25
    with torch.no_grad():  # a collapsed context: one next token, all but nothing else
        student.embed.weight[25] = 3.0 * torch.sign(student.embed.weight[25])
        student.lm_head.weight[17] = -0.8 * torch.sign(student.embed.weight[25])
        student.lm_head.weight[3] = 1.5 * torch.sign(student.embed.weight[25])
    teacher_logits = 1.5 * torch.randn(2, 7, 26)
    mask = torch.ones(2, 7)
    mask[0, 5:] = 0
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    return SimpleNamespace(model=student, optimizer=optimizer, batch={"ids": ids, "teacher_logits": teacher_logits, "mask": mask})


def run(s=None):
    s = s or build()
    mask = s.batch["mask"]
    for _ in range(2):
        per_token = f_divergence(s.model(s.batch["ids"]), s.batch["teacher_logits"], alpha=1.0)
        loss = (per_token * mask).sum() / mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

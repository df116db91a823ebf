"""ABKD distillation (alpha-beta divergence): the student's probabilities are raised to beta < 1, and the padded vocabulary columns have probability 0.

Both heads are padded to a round vocabulary, the padding logits are -inf. The divergence is filled with 0 there (inf_mask), so the loss is finite. But the power
q ** beta was taken before, and its derivative beta * q ** (beta - 1) is inf at q = 0: the masked fill sends a gradient of 0 back and 0 * inf is NaN, in every row.

Source: https://github.com/ghwang-s/abkd/blob/main/distillation_llm/distillm/losses.py (ab_div, general case)
Heals: giving the padding columns a harmless probability before the power (masked_fill of q), a floor under q, exp(beta * log_softmax), a where on the input.
Does not: the masked_fill of the product, a large negative finite logit instead of -inf (the probability still underflows to 0), a float64 loss.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "sqrt_zero_grad"),
    op=("pow",),
    index=(0, 0, 29),
    masked=True,
    role=("hidden", "loss", "kl"),
    fix=("mask_before_op", "clamp_input", "stable_function", "avoid_singular_op", "where_on_detached"),
    variable=("q_beta",),
    line=("q_beta = torch.pow(student_probs, beta)",),
)

VOCAB, PADDED = 29, 32


class Student(nn.Module):
    def __init__(self, dim=20):
        super().__init__()
        self.embed = nn.Embedding(PADDED, dim)
        self.block = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.lm_head = nn.Linear(dim, PADDED)
        self.register_buffer("padding", torch.arange(PADDED) >= VOCAB)

    def forward(self, ids):
        h = self.embed(ids)
        return self.lm_head(h + self.block(h)).masked_fill(self.padding, float("-inf"))


def ab_div(logits, teacher_logits, label, alpha, beta):
    teacher_probs = F.softmax(teacher_logits, dim=-1, dtype=torch.float32)
    student_probs = F.softmax(logits, dim=-1, dtype=torch.float32)
    inf_mask = torch.isinf(logits) | torch.isinf(teacher_logits)

    p_alpha = torch.pow(teacher_probs, alpha)
    q_beta = torch.pow(student_probs, beta)
    divergence = (p_alpha * q_beta).masked_fill(inf_mask, 0)
    tmp = torch.pow(teacher_probs, alpha + beta) * (alpha / (alpha + beta))
    divergence = divergence - tmp.masked_fill(inf_mask, 0)
    tmp = torch.pow(student_probs, alpha + beta) * (beta / (alpha + beta))
    divergence = divergence - tmp.masked_fill(inf_mask, 0)
    divergence = -divergence.sum(dim=-1) / (alpha * beta)

    mask = (label != -100).float()
    return (divergence * mask).sum() / mask.sum()


def build():
    torch.manual_seed(21)
    student = Student()
    ids = torch.randint(0, VOCAB, (3, 6))
    teacher_logits = 2.0 * torch.randn(3, 6, PADDED)
    teacher_logits[..., VOCAB:] = float("-inf")
    label = ids.roll(-1, dims=1)
    label[:, -1] = -100
    label[2, 3:] = -100
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    return SimpleNamespace(model=student, optimizer=optimizer, batch={"ids": ids, "teacher_logits": teacher_logits, "label": label})


def run(s=None):
    s = s or build()
    history = []
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = ab_div(s.model(s.batch["ids"]), s.batch["teacher_logits"], s.batch["label"], alpha=0.5, beta=0.7)
        loss.backward()
        s.optimizer.step()
        history.append(loss.item())
    return history


if __name__ == "__main__":
    print(run())

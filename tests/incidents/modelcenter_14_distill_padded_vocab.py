"""Word-level distillation where both heads are padded to a round vocabulary size: 0 * -inf on the padding columns."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero",),
    op=("mul",),
    index=(0, 21),
    masked=False,
    role=("kl", "loss", "entropy"),
    fix=("finite_mask_fill", "stable_function"),
    variable=("weighted",),
    line=("weighted = teacher_prob * student_logp",),
)


class PaddedHeadLM(nn.Module):
    def __init__(self, vocab, padded_vocab, width):
        super().__init__()
        self.vocab = vocab
        self.wte = nn.Embedding(padded_vocab, width)
        self.ff = nn.Linear(width, width)
        self.head = nn.Linear(width, padded_vocab, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        x = x + torch.nn.functional.gelu(self.ff(x))
        scores = self.head(x)
        scores[..., self.vocab :] = float("-inf")
        return scores


def soft_target_loss(student_scores, teacher_scores, temperature):
    teacher_prob = torch.softmax(teacher_scores / temperature, dim=-1)
    student_logp = torch.log_softmax(student_scores / temperature, dim=-1)
    weighted = teacher_prob * student_logp
    return -(temperature**2) * weighted.sum(dim=1).mean()


def build():
    torch.manual_seed(1407)
    student = PaddedHeadLM(21, 24, 10)
    teacher = PaddedHeadLM(21, 24, 16).requires_grad_(False)
    batch = {"tokens": torch.randint(0, 21, (13,)), "targets": torch.randint(0, 21, (13,))}
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4)
    return SimpleNamespace(model=student, teacher=teacher, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    student_scores = s.model(s.batch["tokens"])
    with torch.no_grad():
        teacher_scores = s.teacher(s.batch["tokens"])
    hard = nn.functional.cross_entropy(student_scores, s.batch["targets"])
    loss = 0.5 * hard + 0.5 * soft_target_loss(student_scores, teacher_scores, temperature=2.0)
    s.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    s.optimizer.step()
    return loss

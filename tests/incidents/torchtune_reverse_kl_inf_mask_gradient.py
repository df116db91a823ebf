"""torchtune ReverseKLLoss - student and teacher give padded vocabulary rows the logit -inf. The products with their log-probs are
0 * -inf = NaN there and masked_fill sets them to 0, so the loss is right; backward multiplies the zero gradient of the fill by the
teacher's -inf log-prob and the student's gradient is NaN.

https://github.com/meta-pytorch/torchtune/blob/main/torchtune/modules/loss/kd_losses.py (class ReverseKLLoss)
Heals: masked_fill on the log-probs before the product, or a finite fill of the padded logits. Does not: nan_to_num or torch.where on the
product. (The forward KL of the same file is fine: there the factor next to the student is the teacher's finite probability.)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "plogp_zero", "inf_times_zero_mask"),
    op=("mul", "log_softmax"),
    index=(0, 0, 14),
    masked=True,
    role=("kl", "ref_log_probs", "log_probs", "logits", "entropy"),
    fix=("mask_before_op", "stable_function", "finite_mask_fill"),
    variable=(None, "teacher_logprob"),
    line=(
        "cross = torch.masked_fill(student_prob * teacher_logprob, inf_mask, 0)",
        "neg_entropy = torch.masked_fill(student_prob * student_logprob, inf_mask, 0)",  # the same trap, a line further
        "teacher_logprob = F.log_softmax(teacher_logits, dim=-1, dtype=torch.float32)",
    ),
)


class ReverseKLLoss(nn.Module):
    """KL(student || teacher) over the vocabulary, averaged over the tokens that have a label."""

    def __init__(self, ignore_index=-100):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits, teacher_logits, labels):
        student_prob = F.softmax(student_logits, dim=-1, dtype=torch.float32)
        student_logprob = F.log_softmax(student_logits, dim=-1, dtype=torch.float32)
        teacher_logprob = F.log_softmax(teacher_logits, dim=-1, dtype=torch.float32)
        inf_mask = torch.isinf(teacher_logits) | torch.isinf(student_logits)
        cross = torch.masked_fill(student_prob * teacher_logprob, inf_mask, 0)
        neg_entropy = torch.masked_fill(student_prob * student_logprob, inf_mask, 0)
        x = torch.sum(cross - neg_entropy, dim=-1).view(-1)
        mask = (labels != self.ignore_index).int()
        return -torch.sum(x * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


class CausalLM(nn.Module):
    def __init__(self, vocab_size=14, padded_vocab_size=16, dim=8):
        super().__init__()
        self.vocab_size = vocab_size
        self.tok_embeddings = nn.Embedding(padded_vocab_size, dim)
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, padded_vocab_size, bias=False)

    def forward(self, tokens):
        logits = self.output(self.norm(self.tok_embeddings(tokens)))
        padding = torch.arange(logits.shape[-1]) >= self.vocab_size
        return logits.masked_fill(padding, float("-inf"))


def build():
    torch.manual_seed(41)
    student, teacher = CausalLM(), CausalLM(dim=12).requires_grad_(False)
    tokens = torch.randint(0, 14, (2, 6))
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    labels[1, :2] = -100
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4)
    return SimpleNamespace(
        model=student, teacher=teacher, optimizer=optimizer, tokens=tokens, labels=labels, loss_fn=ReverseKLLoss(), kd_ratio=0.5
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        teacher_logits = s.teacher(s.tokens)
    student_logits = s.model(s.tokens)
    class_loss = F.cross_entropy(student_logits.flatten(0, 1), s.labels.flatten(), ignore_index=-100)
    kd_loss = s.loss_fn(student_logits, teacher_logits, s.labels)
    loss = (1 - s.kd_ratio) * class_loss + s.kd_ratio * kd_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

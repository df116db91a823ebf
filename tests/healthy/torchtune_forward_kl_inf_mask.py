"""torchtune ForwardKLLoss - student and teacher mask padded vocabulary rows with -inf, the product 0 * -inf is NaN there and masked_fill
takes it out. This guard holds: the factor next to the student's log-prob is the teacher's finite probability, so backward computes
0 * 0 and the gradient is exactly that of the distribution without the padded rows.

https://github.com/meta-pytorch/torchtune/blob/main/torchtune/modules/loss/kd_losses.py (class ForwardKLLoss)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class ForwardKLLoss(nn.Module):
    def __init__(self, ignore_index=-100):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits, teacher_logits, labels):
        teacher_prob = F.softmax(teacher_logits, dim=-1, dtype=torch.float32)
        inf_mask = torch.isinf(student_logits)
        student_logprob = F.log_softmax(student_logits, dim=-1, dtype=torch.float32)
        prod_probs = torch.masked_fill(teacher_prob * student_logprob, inf_mask, 0)
        x = torch.sum(prod_probs, dim=-1).view(-1)
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
    torch.manual_seed(42)
    student, teacher = CausalLM(), CausalLM(dim=12).requires_grad_(False)
    tokens = torch.randint(0, 14, (2, 6))
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4)
    return SimpleNamespace(
        model=student, teacher=teacher, optimizer=optimizer, tokens=tokens, labels=labels, loss_fn=ForwardKLLoss(), kd_ratio=0.5
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
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

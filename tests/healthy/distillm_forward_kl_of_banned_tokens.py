"""Forward KL distillation where both teacher and student have banned vocabulary entries at -inf. Healthy.

p * log q is 0 * -inf = NaN at the banned entries; masked_fill puts 0 there before the sum. Its backward sends exact zeros into a product whose other
factor is the finite teacher probability, and log_softmax gives a banned logit the gradient 0. Loss, gradients and weights are finite.

Source: https://github.com/jongwooko/distillm/blob/master/distillm/losses.py (forward_kl).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class LM(nn.Module):
    def __init__(self, vocab=22, dim=16, banned=(0, 7, 21)):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)
        suppress = torch.zeros(vocab)
        suppress[list(banned)] = float("-inf")
        self.register_buffer("suppress", suppress)

    def forward(self, ids):
        return self.head(F.gelu(self.fc(self.emb(ids)))) + self.suppress


def forward_kl(logits, teacher_logits, labels):
    teacher_probs = F.softmax(teacher_logits, dim=-1, dtype=torch.float32)
    inf_mask = torch.isinf(logits)
    student_logprobs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    prod_probs = torch.masked_fill(teacher_probs * student_logprobs, inf_mask, 0)
    x = torch.sum(prod_probs, dim=-1).view(-1)
    mask = (labels != -100).int()
    return -torch.sum(x * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


def build():
    torch.manual_seed(3)
    student, teacher = LM(), LM(dim=32).requires_grad_(False)
    ids = torch.randint(1, 7, (3, 8))
    labels = ids.clone()
    labels[:, :3] = -100
    labels[1, 6:] = -100
    return SimpleNamespace(
        model=student, teacher=teacher, optimizer=torch.optim.AdamW(student.parameters(), lr=2e-3), batch=dict(ids=ids, labels=labels)
    )


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(3):
        with torch.no_grad():
            teacher_logits = s.teacher(s.batch["ids"])
        loss = forward_kl(s.model(s.batch["ids"]), teacher_logits, s.batch["labels"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

"""LMOps #38 - MiniLLM's distillation loss with -inf logits in the padded vocabulary.

teacher_probs * logprobs is 0 * -inf = NaN there, and masked_fill writes 0 over it after the product. This is no trap: backward only
multiplies by the finite teacher probability, log_softmax has probability 0 at -inf, and the labels here leave tokens to average over.
Source: https://github.com/microsoft/LMOps/issues/38
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    def __init__(self, vocab=14, padded_vocab=16, dim=10):
        super().__init__()
        self.vocab = vocab
        self.embed = nn.Embedding(padded_vocab, dim)
        self.lm_head = nn.Linear(dim, padded_vocab)

    def forward(self, ids):
        logits = self.lm_head(torch.tanh(self.embed(ids)))
        pad = torch.arange(logits.shape[-1]) >= self.vocab
        return logits.masked_fill(pad, float("-inf"))


def get_distil_loss(teacher_logits, logits, labels):
    teacher_probs = F.softmax(teacher_logits, dim=-1, dtype=torch.float32)
    inf_mask = torch.isinf(logits)
    logprobs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    prod_probs = torch.masked_fill(teacher_probs * logprobs, inf_mask, 0)
    x = torch.sum(prod_probs, dim=-1).view(-1)
    mask = (labels != -100).int()
    return -torch.sum(x * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


def build():
    torch.manual_seed(38)
    student, teacher = TinyLM(), TinyLM()
    ids = torch.randint(0, 14, (2, 8))
    labels = ids.roll(-1, 1)
    labels[:, :3] = -100
    labels[:, -1] = -100
    return SimpleNamespace(
        model=student, teacher=teacher, optimizer=torch.optim.AdamW(student.parameters(), lr=1e-3), ids=ids, labels=labels
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        teacher_logits = s.teacher(s.ids)
    loss = get_distil_loss(teacher_logits, s.model(s.ids), s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""Healthy. DistillKit's sparse Jensen-Shannon loss: slots of the top-k that the teacher did not fill carry the log-prob -inf.

exp(-inf) = 0, and the term p * (log p - log m) is 0 * -inf = NaN in those slots. torch.where(p > eps, term, 0) drops it. The teacher's side needs no gradient: what goes back through the product is
the (zero) gradient times the probability 0, into log m, which is finite because m was clamped before its log. The student's side has no infinity at all.

Source: https://github.com/arcee-ai/DistillKit/blob/main/distillkit/lossfuncs/jsd.py (sparse_jsd_inner, missing="zero")
"""

from types import SimpleNamespace

import torch
from torch import nn


class Student(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.mlp(x))


def sparse_jsd(logits, target_ids, target_logprobs, mask, eps=1e-8):
    lse = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    student_logprobs = logits.gather(-1, target_ids) - lse
    student_probs = torch.exp(student_logprobs)
    teacher_probs = torch.exp(target_logprobs)

    m_probs = 0.5 * (teacher_probs + student_probs)
    log_m = torch.log(m_probs.clamp(min=eps))

    p_terms = teacher_probs * (target_logprobs - log_m)
    kl_p_m = torch.where(teacher_probs > eps, p_terms, torch.zeros_like(p_terms)).sum(-1)
    q_terms = student_probs * (student_logprobs - log_m)
    kl_q_m = torch.where(student_probs > eps, q_terms, torch.zeros_like(q_terms)).sum(-1)
    jsd = 0.5 * (kl_p_m + kl_q_m) * mask
    return jsd.sum() / mask.sum()


def build():
    torch.manual_seed(17)
    student = Student()
    ids = torch.randint(0, 30, (3, 6))
    values, target_ids = torch.randn(3, 6, 30).log_softmax(-1).topk(5)
    values[0, 1, 3:] = float("-inf")  # nucleus of three tokens
    values[2, 4, 1:] = float("-inf")  # greedy position: a single candidate
    values[2, 4, 0] = 0.0
    mask = torch.ones(3, 6)
    mask[1, :2] = 0
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    return SimpleNamespace(model=student, optimizer=optimizer, batch={"ids": ids, "target_ids": target_ids, "values": values, "mask": mask})


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(3):
        loss = sparse_jsd(s.model(b["ids"]), b["target_ids"], b["values"], b["mask"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

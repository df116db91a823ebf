"""Sparse top-k distillation (DistillKit, missing="symmetric_uniform"): the mass that the top-k leaves over is log1p(-sum), and the sum is exactly 1.

The student's probability on the teacher's k candidates is summed and clamped to [eps, 1 - eps] with eps = 1e-8 before log1p(-sum). In float32 the number
1 - 1e-8 is 1.0, so the upper clamp does nothing: on one confident token the sum is 1.0, log1p(-1) = -inf, and the leftover KL of that token is +inf
(and the gradient is not finite). The teacher, taken at temperature 1 from rounded log-probs, still has leftover mass there.

Source: https://github.com/arcee-ai/DistillKit/blob/main/distillkit/lossfuncs/kl.py (sparse_kl_div_inner), lossfuncs/common.py
Heals: an eps that float32 can tell from 0 next to 1 (1e-6), a clamp of the sum at 1 - 1e-6, the leftover by logsumexp over the other tokens.
Does not: clamp(min=eps) alone, skipping the masked tokens (the token counts), a smaller eps, clipping the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "log_zero"),
    op=("log1p",),
    index=(1, 2),
    masked=False,
    role=("log_probs", "kl", "hidden", "loss"),
    fix=("representable_eps", "clamp_input", "stable_function"),
    variable=("log_student_missing",),
    line=("log_student_missing = torch.log1p(-student_prob_sum.clamp(min=eps, max=1 - eps))",),
)


class Student(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.emb(ids))))


def sparse_kl_div_inner(logits, target_ids, target_values, mask, eps=1e-8):
    student_lse = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    sparse_student_logprobs = logits.gather(-1, target_ids) - student_lse
    sparse_target_logprobs = target_values.float()

    teacher_probs = torch.exp(sparse_target_logprobs)
    teacher_prob_sum = teacher_probs.sum(dim=-1)
    inner_sum = torch.sum(teacher_probs * (sparse_target_logprobs - sparse_student_logprobs), dim=-1)

    log_teacher_missing = torch.log1p(-teacher_prob_sum.clamp(min=eps, max=1 - eps))
    student_prob_sum = sparse_student_logprobs.exp().sum(dim=-1)
    log_student_missing = torch.log1p(-student_prob_sum.clamp(min=eps, max=1 - eps))
    missing_kl = torch.exp(log_teacher_missing) * (log_teacher_missing - log_student_missing)

    inner_sum = inner_sum * mask
    inner_sum = inner_sum + missing_kl * mask
    return inner_sum.sum() / mask.sum()


def build():
    torch.manual_seed(3)
    model = Student()
    ids = torch.randint(0, 20, (2, 5))
    ids[1, 2] = 21
    with torch.no_grad():  # the token after 21 is already known by heart
        model.emb.weight[21] = 4.0 * torch.sign(model.emb.weight[21])
        hidden = torch.tanh(model.mix(model.emb.weight[21]))
        model.head.weight[7] = 40.0 * hidden / hidden.square().sum()
    teacher = torch.randn(2, 5, 24)
    teacher[..., 7] += 1.0
    teacher[1, 2, 7] += 3.0
    values, target_ids = teacher.log_softmax(-1).topk(4)
    mask = torch.ones(2, 5)
    mask[0, 3:] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"input_ids": ids, "target_ids": target_ids, "target_logprobs": values, "mask": mask}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        logits = s.model(s.batch["input_ids"])
        loss = sparse_kl_div_inner(logits, s.batch["target_ids"], s.batch["target_logprobs"], s.batch["mask"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

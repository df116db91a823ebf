"""slime #2051 (multi-teacher on-policy distillation) - a token's advantage is the reverse KL averaged over the teachers of its domain.

A rollout of a domain for which no teacher is served has an empty row in the teacher table: the sum over its teachers is 0 and their number
is 0, so the average is 0/0 at every token of that rollout. The tokens count in the loss.
Source: https://github.com/THUDM/slime/pull/2051 . Heals: at least 1 in the denominator (advantage 0), or leaving such rollouts out.
Does not: clipping the advantage or the importance weight.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(2, 0),
    masked=False,
    role=("advantages", "kl", "log_ratio"),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "representable_eps", "validate_config"),
    variable=("mopd_advantages", "advantages"),
    line=("mopd_advantages = reverse_kl_sum / num_teachers",),
)
DOMAINS = ("math", "code", "chat")


class Student(nn.Module):
    def __init__(self, vocab=22, dim=14):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def token_log_probs(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def compute_mopd_advantages(teacher_log_probs, student_log_probs, teacher_table):
    reverse_kl = teacher_log_probs - student_log_probs.unsqueeze(1)
    reverse_kl_sum = (reverse_kl * teacher_table.unsqueeze(-1)).sum(dim=1)
    num_teachers = teacher_table.sum(dim=1, keepdim=True)
    mopd_advantages = reverse_kl_sum / num_teachers
    return mopd_advantages


def build():
    torch.manual_seed(36)
    model = Student()
    served = {"math": [1.0, 0.0], "code": [0.0, 1.0]}
    domains = ["math", "code", "chat", "math"]
    teacher_table = torch.tensor([served.get(d, [0.0, 0.0]) for d in domains])
    ids = torch.randint(0, 22, (4, 8))
    with torch.no_grad():
        rollout_log_probs = token_log_probs(model, ids)
    teacher_log_probs = rollout_log_probs.unsqueeze(1) + 0.4 * torch.randn(4, 2, 7)
    return SimpleNamespace(
        model=model,
        ids=ids,
        rollout_log_probs=rollout_log_probs,
        teacher_log_probs=teacher_log_probs.clamp(max=-1e-3),
        teacher_table=teacher_table,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None, eps_low=0.2, eps_high=5.0):
    s = s or build()
    log_probs = token_log_probs(s.model, s.ids)
    advantages = compute_mopd_advantages(s.teacher_log_probs, log_probs.detach(), s.teacher_table)
    weight = torch.exp(log_probs.detach() - s.rollout_log_probs).clamp(eps_low, eps_high)
    loss = -(weight * advantages * log_probs).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

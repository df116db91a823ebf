"""DSKD, code/criterions/various_divergence.py, compute_skewed_forward_kl_divergence
(https://github.com/songmzhang/DSKD/blob/main/code/criterions/various_divergence.py): padded vocabulary entries are recognised by isinf(logits).
Here student and teacher fill them with finfo.min, which is finite, so both probabilities are an exact 0 and the mixture's logarithm is -inf.

Heals: a floor under the mixture, or its log-probabilities by logaddexp, or fill the mixture there before the logarithm. Does not heal:
masking the NaN out of the divergence afterwards, the backward of log divides 0 by 0.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero", "plogp_zero"),
    op=("log",),
    index=(0, 0, 21),
    masked=False,
    role=("log_probs", "kl"),
    fix=("stable_function", "clamp_input", "mask_before_op"),
    variable=("mixed_lprobs",),
    line=("mixed_lprobs = torch.log(mixed_probs)",),
)


class CausalLM(nn.Module):
    def __init__(self, dim, vocab=21, padded_vocab=24):
        super().__init__()
        self.embed = nn.Embedding(padded_vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, padded_vocab, bias=False)
        self.vocab = vocab

    def forward(self, input_ids):
        logits = self.lm_head(torch.tanh(self.fc(self.embed(input_ids))))
        padded = torch.arange(logits.size(-1)) >= self.vocab
        return logits.masked_fill(padded, torch.finfo(logits.dtype).min)


class VariousDivergence:
    def __init__(self, kd_rate=0.5, kd_temp=2.0, skew_lambda=0.1, padding_id=-100):
        self.kd_rate = kd_rate
        self.kd_temp = kd_temp
        self.skew_lambda = skew_lambda
        self.padding_id = padding_id

    def __call__(self, logits, teacher_logits, target):
        denom = target.ne(self.padding_id).sum()
        ce = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=self.padding_id)
        kd = self.compute_skewed_forward_kl_divergence(logits, teacher_logits, target) / denom
        return (1 - self.kd_rate) * ce + self.kd_rate * kd

    def compute_skewed_forward_kl_divergence(self, logits, teacher_logits, target):
        logits = logits / self.kd_temp
        teacher_logits = teacher_logits / self.kd_temp

        student_probs = torch.softmax(logits, -1, dtype=torch.float32)
        teacher_probs = torch.softmax(teacher_logits, -1, dtype=torch.float32)
        mixed_probs = self.skew_lambda * teacher_probs + (1 - self.skew_lambda) * student_probs
        mixed_lprobs = torch.log(mixed_probs)
        teacher_lprobs = torch.log_softmax(teacher_logits, -1, dtype=torch.float32)
        kld = teacher_probs * (teacher_lprobs - mixed_lprobs)
        inf_mask = logits.isinf() | teacher_logits.isinf()
        kld = kld.masked_fill(inf_mask, 0.0).sum(-1)

        pad_mask = target.eq(self.padding_id)
        return kld.masked_fill(pad_mask, 0.0).sum()


def build():
    torch.manual_seed(24)
    student, teacher = CausalLM(8), CausalLM(16)
    teacher.requires_grad_(False)
    input_ids = torch.randint(0, 21, (2, 7))
    target = torch.cat([input_ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    target[1, 4:] = -100
    return SimpleNamespace(
        model=student,
        teacher=teacher,
        criterion=VariousDivergence(),
        input_ids=input_ids,
        target=target,
        optimizer=torch.optim.AdamW(student.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        teacher_logits = s.teacher(s.input_ids)
    loss = s.criterion(s.model(s.input_ids), teacher_logits, s.target)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())

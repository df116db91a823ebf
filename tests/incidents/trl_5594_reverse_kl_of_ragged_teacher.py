"""TRL DistillationTrainer, reverse KL against a teacher server whose answers are of unequal length.

The rectangular tensor of teacher log-probs is filled with -inf where a sample has no more tokens. Reverse KL multiplies student_probs, which are not 0, with
log_s - (-inf); nan_to_num makes it finite and the label mask leaves it out, so the loss is fine, but the derivative is 0 * inf.
(Source: huggingface/trl, pull request 5594, trl/experimental/distillation/distillation_trainer.py, _get_teacher_token_logprobs_from_server and _jsd_divergence.)
Heals: filling the padding with 0 or a finite number; where with the label mask on the teacher before _jsd_divergence; support_mask = isfinite; clamping at -100. Does not: nan_to_num with posinf=0 (gradient
stays NaN); where(mask, jsd, 0) instead of indexing; clipping gradients.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "inf_times_zero_mask"),
    op=("full", "sub", "mul"),
    index=(0, 2, 0),
    masked=True,
    role=("ref_log_probs", "log_probs", "log_ratio", "kl"),
    fix=("finite_mask_fill", "mask_before_op", "clamp_input"),
    variable=("teacher_topk_logprobs", None),
    line=(
        'teacher_topk_logprobs = torch.full((batch_size, completion_length, top_k), float("-inf"))',
        "jsd = torch.nan_to_num(student_probs * (safe_student - safe_teacher), nan=0.0)",
    ),
)


class Student(nn.Module):
    def __init__(self, vocab=18, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.block = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.wte(input_ids)
        return self.lm_head(hidden + self.block(hidden))


def _add_tail_bucket(log_probs, valid_mask):
    log_sum = torch.logsumexp(log_probs, dim=-1, keepdim=True)
    log_sum = torch.clamp(log_sum, max=-1e-7)
    tail = torch.log(-torch.expm1(log_sum))
    tail_mask = torch.ones_like(valid_mask[..., :1], dtype=torch.bool)
    return torch.cat([log_probs, tail], dim=-1), torch.cat([valid_mask, tail_mask], dim=-1)


def _jsd_divergence(student_log_probs, teacher_log_probs, support_mask):
    safe_student = torch.where(support_mask, student_log_probs, torch.zeros_like(student_log_probs))
    safe_teacher = torch.where(support_mask, teacher_log_probs, torch.zeros_like(teacher_log_probs))
    student_probs = torch.where(support_mask, student_log_probs.exp(), torch.zeros_like(student_log_probs))
    jsd = torch.nan_to_num(student_probs * (safe_student - safe_teacher), nan=0.0)
    return jsd


def get_teacher_token_logprobs_from_server(response, completion_length):
    batch_size = len(response["logprobs"])
    top_k = len(response["logprobs"][0][0])
    teacher_topk_logprobs = torch.full((batch_size, completion_length, top_k), float("-inf"))
    teacher_topk_ids = torch.zeros((batch_size, completion_length, top_k), dtype=torch.long)
    for i, (lps, ids) in enumerate(zip(response["logprobs"], response["logprob_token_ids"])):
        teacher_topk_logprobs[i, : len(lps)] = torch.tensor(lps)
        teacher_topk_ids[i, : len(ids)] = torch.tensor(ids)
    return teacher_topk_ids, teacher_topk_logprobs


def build():
    torch.manual_seed(5)
    model = Student()
    input_ids = torch.randint(1, 18, (2, 8))
    labels = input_ids.clone()
    labels[:, :4] = -100
    labels[0, 6:] = -100
    input_ids[0, 6:] = 0
    response = {
        "logprobs": [[[-0.9], [-2.3]], [[-1.1], [-0.4], [-3.0], [-0.2]]],
        "logprob_token_ids": [[[t] for t in input_ids[0, 4:6].tolist()], [[t] for t in input_ids[1, 4:].tolist()]],
    }
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-4),
        inputs={"input_ids": input_ids, "labels": labels, "prompt_length": 4},
        teacher_response=response,
    )


def compute_loss(model, inputs, teacher_response, temperature=1.0):
    prompt_length = inputs["prompt_length"]
    labels = inputs["labels"][:, prompt_length:]
    teacher_topk_ids, teacher_topk_logprobs = get_teacher_token_logprobs_from_server(teacher_response, labels.shape[1])

    logits = model(inputs["input_ids"])[:, prompt_length - 1 : -1, :]
    student_log_probs = F.log_softmax(logits / temperature, dim=-1)
    student_topk_logprobs = student_log_probs.gather(-1, teacher_topk_ids)

    valid = torch.ones_like(teacher_topk_ids, dtype=torch.bool)
    student_sup, support_mask = _add_tail_bucket(student_topk_logprobs, valid)
    teacher_sup, _ = _add_tail_bucket(teacher_topk_logprobs, valid)
    jsd = _jsd_divergence(student_sup, teacher_sup, support_mask)
    mask = labels != -100
    return jsd[mask].sum() / mask.sum()


def run(s=None):
    s = s or build()
    loss = compute_loss(s.model, s.inputs, s.teacher_response)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

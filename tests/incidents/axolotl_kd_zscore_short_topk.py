"""axolotl top-k distillation with z-score scaling - the teacher returned three candidates for one position where K is four; the fourth
slot holds log-prob -inf and target_mask 0. The masked mean of the z-score multiplies by the mask, 0 * -inf = NaN, and takes the three
good candidates of that position with it: the loss and all gradients are NaN.

https://github.com/axolotl-ai-cloud/axolotl/blob/main/src/axolotl/integrations/kd/topk_logprob/forward_kl.py (zscore_standardize,
topk_kd_loss_with_zscore)
Heals: masked_fill of the empty slots before the mean (or a finite fill in the collator). Does not: the later selection by valid_mask
(it is there), nan_to_num of the finished loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "input"),
    cause=("inf_times_zero_mask", "bad_input"),
    op=("mul",),
    index=(1, 2, 3),
    masked=True,
    role=("ref_log_probs", "logits", "log_probs"),
    fix=("mask_before_op", "finite_mask_fill", "clamp_input"),
    variable=(None, "target_logprobs", "logits"),
    line=("mean = (logits * float_mask).sum(dim=-1, keepdim=True) / count",),
)


def zscore_standardize(logits, mask, base_temperature=1.0, eps=1e-9):
    float_mask = mask.to(logits.dtype)
    count = float_mask.sum(dim=-1, keepdim=True).clamp_min(1.0)
    mean = (logits * float_mask).sum(dim=-1, keepdim=True) / count
    var = (float_mask * (logits - mean) ** 2).sum(dim=-1, keepdim=True) / count
    std = torch.sqrt(var.clamp_min(eps))
    return (logits - mean) / (std * base_temperature)


def topk_kd_loss_with_zscore(student_logits, target_token_ids, target_logprobs, target_mask, zscore_base_temp=1.0):
    target_logprobs = target_logprobs.float()
    student_topk_logits = torch.gather(student_logits, dim=-1, index=target_token_ids).float()
    teacher_z = zscore_standardize(target_logprobs, mask=target_mask, base_temperature=zscore_base_temp)
    student_z = zscore_standardize(student_topk_logits, mask=target_mask, base_temperature=zscore_base_temp)
    teacher_logprobs_z = teacher_z - torch.logsumexp(teacher_z, dim=-1, keepdim=True)
    student_logprobs_z = student_z - torch.logsumexp(student_z, dim=-1, keepdim=True)
    valid_mask = target_mask.bool()
    teacher_logprobs_z = teacher_logprobs_z[valid_mask]
    student_logprobs_z = student_logprobs_z[valid_mask]
    kd_loss_per_token = teacher_logprobs_z.exp() * (teacher_logprobs_z - student_logprobs_z)
    return kd_loss_per_token.sum() / float(kd_loss_per_token.size(0))


def collate(rows, top_k=4, pad_token_id=0):
    """rows: per sample, per position a list of (token id, log-prob) from the teacher's server."""
    seq_len = max(len(row) for row in rows)
    ids = torch.full((len(rows), seq_len, top_k), pad_token_id)
    logprobs = torch.full((len(rows), seq_len, top_k), float("-inf"))
    mask = torch.zeros(len(rows), seq_len, top_k, dtype=torch.long)
    for b, row in enumerate(rows):
        for t, candidates in enumerate(row):
            for k, (token_id, logprob) in enumerate(candidates):
                ids[b, t, k], logprobs[b, t, k], mask[b, t, k] = token_id, logprob, 1
    return ids, logprobs, mask


def build():
    torch.manual_seed(2700)
    student = nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 30))
    input_ids = torch.randint(0, 30, (2, 5))
    rows = []
    for b in range(2):
        row = []
        for t in range(5):
            logprobs, token_ids = torch.randn(30).mul(2.0).log_softmax(-1).topk(4)
            row.append(list(zip(token_ids.tolist(), logprobs.tolist())))
        rows.append(row)
    rows[1][2] = rows[1][2][:3]  # the server left one candidate out
    target_token_ids, target_logprobs, target_mask = collate(rows)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-5)
    return SimpleNamespace(
        model=student,
        optimizer=optimizer,
        input_ids=input_ids,
        target_token_ids=target_token_ids,
        target_logprobs=target_logprobs,
        target_mask=target_mask,
    )


def run(s=None):
    s = s or build()
    student_logits = s.model(s.input_ids)
    loss = topk_kd_loss_with_zscore(student_logits, s.target_token_ids, s.target_logprobs, s.target_mask)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

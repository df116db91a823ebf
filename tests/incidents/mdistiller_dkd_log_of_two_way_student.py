"""Decoupled knowledge distillation (DKD) for a language model: the target-class term takes the log of a two-way split of the student's softmax.

(p_target, p_rest) is summed from softmax probabilities and then torch.log is applied, where the other term uses log_softmax. On one token (the closing
bracket of a tool call) the student is sure by 130 logits: p_rest is exactly 0, log(0) = -inf, and the teacher still leaves 4 % for the rest: the KL is inf
and the gradient NaN.
Source: https://github.com/megvii-research/mdistiller/blob/master/mdistiller/distillers/DKD.py (dkd_loss: `log_pred_student = torch.log(pred_student)`);
FasterAI #22 clamps at 1e-7 before the log "for numerical stability with extreme-confidence logits".
Heals: a log-sum-exp of the log-probabilities of the rest, or a floor under the two probabilities. Does not: the -1000 of the non-target term, a warm-up of
the loss weight, gradient clipping, label smoothing of the cross entropy.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(6, 1),
    masked=None,
    role=("log_probs", "loss"),
    fix=("stable_function", "clamp_input"),
    variable=("log_pred_student",),
    line=("log_pred_student = torch.log(pred_student)",),
)

VOCAB, CLOSE = 28, 25


def _get_gt_mask(logits, target):
    return torch.zeros_like(logits).scatter_(1, target.unsqueeze(1), 1).bool()


def cat_mask(t, mask1, mask2):
    t1 = (t * mask1).sum(dim=1, keepdims=True)
    t2 = (t * mask2).sum(1, keepdims=True)
    return torch.cat([t1, t2], dim=1)


def dkd_loss(logits_student, logits_teacher, target, alpha, beta, temperature):
    gt_mask = _get_gt_mask(logits_student, target)
    other_mask = ~gt_mask
    pred_student = F.softmax(logits_student / temperature, dim=1)
    pred_teacher = F.softmax(logits_teacher / temperature, dim=1)
    pred_student = cat_mask(pred_student, gt_mask, other_mask)
    pred_teacher = cat_mask(pred_teacher, gt_mask, other_mask)
    log_pred_student = torch.log(pred_student)
    tckd_loss = F.kl_div(log_pred_student, pred_teacher, reduction="sum") * temperature**2 / target.shape[0]
    pred_teacher_part2 = F.softmax(logits_teacher / temperature - 1000.0 * gt_mask, dim=1)
    log_pred_student_part2 = F.log_softmax(logits_student / temperature - 1000.0 * gt_mask, dim=1)
    nckd_loss = F.kl_div(log_pred_student_part2, pred_teacher_part2, reduction="sum") * temperature**2 / target.shape[0]
    return alpha * tckd_loss + beta * nckd_loss


class Student(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(self.embed(ids))


def build():
    torch.manual_seed(12)
    model = Student()
    with torch.no_grad():
        model.embed.weight[24] = 0.0
        model.embed.weight[24, 0] = 20.0
        model.head.weight[CLOSE, 0] = 7.0
    ids = torch.randint(0, 24, (2, 8))
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = -100
    labels[0, :2] = -100
    ids[1, 1], labels[1, 1] = 24, CLOSE
    teacher_logits = torch.randn(2, 8, VOCAB)
    teacher_logits[1, 1, CLOSE] += 7.0
    batch = {"ids": ids, "labels": labels, "teacher_logits": teacher_logits}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    keep = b["labels"] != -100
    for _ in range(2):
        logits = s.model(b["ids"])[keep]
        target = b["labels"][keep]
        loss = F.cross_entropy(logits, target) + dkd_loss(logits, b["teacher_logits"][keep], target, alpha=1.0, beta=2.0, temperature=1.0)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return {"loss": loss.item(), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())

"""TRL IW-OPD (importance-weighted on-policy distillation) in pure float16, with a dummy row that fills up the micro-batch.

The advantage of a token is weighted by 1 + gamma * (1 - prefix / total), prefix and total being running sums of |teacher - rollout| log-probs. total is
protected by clamp_min(1e-8), which is 0 in float16. The dummy row has no label, its advantages are all 0, and 0 / 0 gives it NaN weights. The loss
replaces these positions by 0 with torch.where, and is finite; the product below it still has the NaN as the derivative by the log-prob, and
0 * NaN reaches the logits and every weight.
Source: https://github.com/huggingface/trl/blob/main/trl/experimental/iw_opd/iw_opd_trainer.py (_compute_iw_opd_loss).
Heals: float32 log-probs, an epsilon that float16 knows, the mask applied to the weights (before the product), no dummy row. Does not: the where at the
end (it is there), nan_to_num of the loss, gradient clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "eps_underflow", "where_grad_trap"),
    op=("div",),
    index=(2, 0),
    masked=True,
    role=("advantages", "is_weight", "hidden", "loss"),
    fix=(
        "representable_eps",
        "upcast_fp32",
        "clamp_denominator",
        "mask_before_op",
        "where_on_detached",
        "drop_invalid_sample",
        "guard_empty",
    ),
    variable=(None,),
    line=("weights = (1.0 + gamma * (1.0 - prefix_abs_advantages / total_abs_advantages)).detach()",),
)


class Student(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h + torch.tanh(self.mlp(h)))


def build():
    torch.manual_seed(9)
    model = Student().half()
    completion = torch.randint(1, 24, (4, 7))
    labels = completion.clone()
    labels[0, 5:] = -100
    labels[2] = -100  # dummy row
    completion[2] = 0
    teacher_logprobs = -torch.rand(4, 7, dtype=torch.float16) * 3
    teacher_logprobs[labels == -100] = float("nan")
    batch = dict(ids=torch.randint(1, 24, (4, 7)), completion_tokens=completion, labels=labels, teacher_logprobs=teacher_logprobs)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch=batch)


def compute_iw_opd_loss(student_logits, batch, gamma=1.0, epsilon=1e-8):
    student_log_probs = F.log_softmax(student_logits, dim=-1)
    student_actual_logprobs = student_log_probs.gather(-1, batch["completion_tokens"].unsqueeze(-1)).squeeze(-1)
    valid_mask = batch["labels"] != -100
    safe_teacher_logprobs = torch.where(valid_mask, batch["teacher_logprobs"], 0.0)
    safe_rollout_logprobs = torch.where(valid_mask, student_actual_logprobs, 0.0)
    a_opd = (safe_teacher_logprobs - safe_rollout_logprobs).detach()
    abs_advantages = a_opd.abs()
    prefix_abs_advantages = abs_advantages.cumsum(dim=1) - abs_advantages
    total_abs_advantages = abs_advantages.sum(dim=1, keepdim=True).clamp_min(epsilon)
    weights = (1.0 + gamma * (1.0 - prefix_abs_advantages / total_abs_advantages)).detach()
    advantages = weights * a_opd
    loss = -student_actual_logprobs * advantages
    loss = torch.where(valid_mask, loss, torch.zeros_like(loss))
    return loss.sum() / valid_mask.sum()


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = compute_iw_opd_loss(s.model(s.batch["ids"]), s.batch)
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

"""TAID: the interpolated target (1 - t) * student + t * teacher starts at t = 0, and the teacher's server left -inf outside its top-k.

Source: https://github.com/SakanaAI/TAID (src/distil_losses/taid.py, compute_loss: logits are interpolated, then softmaxed). At t = 0 the teacher is
meant to be off, but 0 * -inf = NaN, one NaN in a row makes the whole softmax NaN, and so the loss on the student's own samples.
Heals: leaving the teacher's term out at t = 0, a finite fill value for what the server did not send, t_start > 0 (then the column has
probability 0, and the product is masked as in the source). Tempting and useless: the inf_mask that is already applied to the product, or
an epsilon in the loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef",),
    op=("mul",),
    index=(0, 2, 0),  # the first that the loss counts
    masked=None,
    role=("logits",),
    fix=("skip_disabled_term", "finite_mask_fill", "validate_config", "clamp_input", "mask_before_op", "fix_upstream"),
    variable=("teacher_part", "t_teacher", None),
    line=("teacher_part = t * teacher_logits",),
)


class Student(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.head = nn.Linear(2 * dim, vocab, bias=False)

    def forward(self, ids):
        return self.head(F.silu(self.up(self.embed(ids))))


class TAID:
    def __init__(self, t_start=0.4, t_end=1.0, alpha=5e-4, beta=0.99):
        assert 0.0 <= t_start < 1.0
        self.t_start, self.t_end, self.alpha, self.beta = t_start, t_end, alpha, beta
        self.t = torch.tensor(t_start)
        self.prev_loss = None
        self.momentum = torch.tensor(0.0)

    def update_t(self, loss, global_step, num_train_steps):
        if self.prev_loss is not None:
            relative_change = (self.prev_loss - loss) / (self.prev_loss + 1e-15)
            self.momentum = self.beta * self.momentum + (1 - self.beta) * relative_change
            delta_t = self.alpha * torch.sigmoid(self.momentum) * (1 - self.t)
            t_target = self.t_start + (self.t_end - self.t_start) * global_step / num_train_steps
            self.t = torch.clamp(self.t + delta_t, min=t_target, max=self.t_end)
        self.prev_loss = loss

    def compute_loss(self, logits, teacher_logits, mask):
        t = self.t
        student_part = (1 - t) * logits.detach()
        teacher_part = t * teacher_logits
        p_t = F.softmax(student_part + teacher_part, dim=-1)
        student_logprobs = F.log_softmax(logits, dim=-1)
        inf_mask = torch.isinf(logits) | torch.isinf(teacher_logits)
        prod_probs = torch.masked_fill(p_t * student_logprobs, inf_mask, 0)
        x = torch.sum(prod_probs, dim=-1).view(-1)
        return -torch.sum(x * mask.view(-1)) / torch.sum(mask)


def build():
    torch.manual_seed(41)
    model, teacher = Student(), Student(dim=20)
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rollouts = torch.randint(0, 20, (3, 8))  # sampled from the student
    mask = torch.ones(3, 7)
    mask[0, :2] = 0
    mask[1, :3] = 0
    mask[1, 6] = 0
    logits = teacher(rollouts[:, :-1])
    top, columns = logits.topk(8, dim=-1)
    teacher_logits = torch.full_like(logits, float("-inf")).scatter(-1, columns, top)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        rollouts=rollouts,
        teacher_logits=teacher_logits,
        mask=mask,
        distil=TAID(t_start=0.0),
        global_step=0,
        num_train_steps=1000,
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.rollouts[:, :-1])
    loss = s.distil.compute_loss(logits, s.teacher_logits, s.mask)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.distil.update_t(loss.detach(), s.global_step, s.num_train_steps)
    return loss

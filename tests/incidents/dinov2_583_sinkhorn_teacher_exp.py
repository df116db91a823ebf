"""dinov2 PR #583 - Sinkhorn-Knopp centering of the teacher: exp(logit / 0.04) overflows fp32 as soon as one logit passes 3.55.

The half precision teacher head returns a logit of 4 for one prototype. exp(100) is inf, the total is inf, and inf / inf makes the teacher's
targets NaN (no_grad), hence the student's cross-entropy, its gradients and, through the EMA, the next teacher.
Source: https://github.com/facebookresearch/dinov2/pull/583 (the same exp stands in swav, issue #67)
Heals: subtract the maximum before exp, clamp the exponent, a warmer teacher temperature. Does not: an epsilon in the sums.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(2, 5),
    masked=None,
    role=("logits", "hidden"),
    fix=("stable_function", "clamp_exponent", "validate_config", "clamp_input", "fix_upstream"),
    variable=(None, "Q"),
    line=("Q = torch.exp(teacher_output / teacher_temp).t()",),
)


class DINOHead(nn.Module):
    def __init__(self, in_dim=12, bottleneck=8, prototypes=10):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 16), nn.GELU(), nn.Linear(16, bottleneck))
        self.last_layer = nn.Linear(bottleneck, prototypes, bias=False)

    def forward(self, x):
        x = self.mlp(x)
        x = F.normalize(x, dim=-1, eps=1e-6 if x.dtype == torch.float16 else 1e-12)
        return self.last_layer(x)


class DINOLoss(nn.Module):
    def __init__(self, student_temp=0.1):
        super().__init__()
        self.student_temp = student_temp

    @torch.no_grad()
    def sinkhorn_knopp_teacher(self, teacher_output, teacher_temp, n_iterations=3):
        teacher_output = teacher_output.float()
        Q = torch.exp(teacher_output / teacher_temp).t()
        B = Q.shape[1]
        K = Q.shape[0]
        sum_Q = torch.sum(Q)
        Q = Q / sum_Q
        for _ in range(n_iterations):
            Q = Q / torch.sum(Q, dim=1, keepdim=True) / K
            Q = Q / torch.sum(Q, dim=0, keepdim=True) / B
        return (Q * B).t()

    def forward(self, student_output, teacher_probs):
        lsm = F.log_softmax(student_output / self.student_temp, dim=-1)
        return -torch.sum(teacher_probs * lsm, dim=-1).mean()


def build():
    torch.manual_seed(5)
    student, teacher = DINOHead(), DINOHead()
    teacher.load_state_dict(student.state_dict())
    teacher = teacher.half().requires_grad_(False)
    crops = torch.randn(6, 12)
    with torch.no_grad():  # the norm of the last layer was not frozen: prototype 5 has grown along image 2
        feature = F.normalize(teacher.mlp(crops[2:3].half()).float(), dim=-1)[0]
        teacher.last_layer.weight[5] = (4.0 * feature).half()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    return SimpleNamespace(
        model=student, teacher=teacher, crops=crops, dino_loss=DINOLoss(), optimizer=optimizer, teacher_temp=0.04, momentum=0.99
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        teacher_logits = s.teacher(s.crops.half())
    teacher_probs = s.dino_loss.sinkhorn_knopp_teacher(teacher_logits, s.teacher_temp)
    student_logits = s.model(s.crops + 0.1)
    loss = s.dino_loss(student_logits, teacher_probs)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 3.0)
    s.optimizer.step()
    with torch.no_grad():
        for p, t in zip(s.model.parameters(), s.teacher.parameters()):
            t.mul_(s.momentum).add_(p.to(t.dtype), alpha=1 - s.momentum)
    return loss

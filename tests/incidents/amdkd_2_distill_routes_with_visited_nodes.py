"""AMDKD, distilling a teacher for routing problems into a smaller attention model by the twisted KLDivLoss of the step-wise log-probs.

Visited nodes are -inf in the logits of both models, so teacher_logp is -inf where the student's probability is 0 and KLDivLoss takes 0 * -inf.
(Source: jieyibi/AMDKD, issue 2, AMDKD-AM/knowledge_distillation.py, train_batch_distill with twist_kldloss and meaningful_KLD off.)
Heals: filling both log-probs with 0 at visited nodes before the loss (or indexing the others); clamping both log-probs at -30; the product form with 1e-5 added to the
probabilities; -50 instead of -inf in the logits. Does not: -1e4 or the lowest finite number in the logits, or masking the teacher alone (the student's probability is still 0 and
the derivative of x log x there is -inf * 0); nan_to_num on the pointwise loss (gradient NaN); log_target=True (-inf - -inf).
"""

from types import SimpleNamespace

import math
import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "inf_times_zero_mask"),
    op=("masked_fill", "log_softmax"),
    index=(0, 0),
    masked=None,
    role=("logits", "log_probs", "attention", "ref_log_probs"),
    fix=("mask_before_op", "clamp_input", "representable_eps", "finite_mask_fill"),
    variable=("logits", "teacher_logp"),
    line=(
        "logits = logits.masked_fill(mask, -math.inf)",
        "return torch.log_softmax(logits / temp, dim=-1)",
    ),
)


class AttentionModel(nn.Module):
    def __init__(self, embedding_dim, tanh_clipping=10.0):
        super().__init__()
        self.tanh_clipping = tanh_clipping
        self.init_embed = nn.Linear(2, embedding_dim)
        self.project_step_context = nn.Linear(2 * embedding_dim, embedding_dim, bias=False)
        self.project_node = nn.Linear(embedding_dim, embedding_dim, bias=False)

    def forward(self, x, first, last, mask, temp=1.0):
        h = torch.relu(self.init_embed(x))
        rows = torch.arange(x.shape[0])
        query = self.project_step_context(torch.cat([h[rows, first], h[rows, last]], dim=-1))
        logits = (self.project_node(h) @ query.unsqueeze(-1)).squeeze(-1) / math.sqrt(h.shape[-1])
        logits = torch.tanh(logits) * self.tanh_clipping
        logits = logits.masked_fill(mask, -math.inf)
        return torch.log_softmax(logits / temp, dim=-1)


def build():
    torch.manual_seed(8)
    teacher_model, student_model = AttentionModel(32), AttentionModel(16)
    x = torch.rand(6, 9, 2)
    route = torch.argsort(torch.rand(6, 9), dim=1)
    route[0, 0] = 0
    visited = torch.zeros(6, 9, dtype=torch.bool).scatter_(1, route[:, :3], True)
    return SimpleNamespace(
        model=student_model,
        teacher_model=teacher_model.eval(),
        optimizer=torch.optim.Adam(student_model.parameters(), lr=1e-4),
        x=x,
        first=route[:, 0],
        last=route[:, 2],
        chosen=route[:, 3],
        mask=visited,
        cost=torch.rand(6) + 3,
        bl_val=torch.full((6,), 3.4),
        opts=SimpleNamespace(rl_alpha=0.5, distill_alpha=0.5, max_grad_norm=1.0),
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        teacher_logp = s.teacher_model(s.x, s.first, s.last, s.mask)
    student_logp = s.model(s.x, s.first, s.last, s.mask)
    log_likelihood = student_logp.gather(1, s.chosen.unsqueeze(1)).squeeze(1)
    reinforce_loss = ((s.cost - s.bl_val) * log_likelihood).mean()
    soft_loss = nn.KLDivLoss()(teacher_logp, student_logp.exp())
    loss = reinforce_loss * s.opts.rl_alpha + soft_loss * s.opts.distill_alpha
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), s.opts.max_grad_norm)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""AReaL `sapo_loss_fn` (same in TRL, verl, Liger) - the ratio of a stale token overflows under a saturated sigmoid gate.

SAPO replaces the clip by 4 / tau * sigmoid(tau * (ratio - 1)). One token of a stale rollout has an old log-prob of -97, its ratio is
exp(93) = inf. The sigmoid is 1 there, so the loss is finite and looks right, but backward multiplies the gate's slope of 0 by the infinite
slope of exp: the gradient of the logits is NaN.
Source: https://github.com/areal-project/AReaL/pull/670; NVIDIA-NeMo/RL #2455 adds a clamp of the log ratio for it.
Heals: clamping the log ratio before exp. Does not: clamping the ratio after exp, or nan_to_num on the gate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("exp_overflow", "where_grad_trap"),
    op=("exp",),
    index=(9,),
    masked=False,
    role=("ratio",),
    fix=("clamp_exponent", "clamp_input"),
    variable=("ratio",),
    line=("ratio = torch.exp(log_ratio)",),
)


def sapo_loss_fn(logprobs, old_logprobs, advantages, tau_pos, tau_neg, loss_mask):
    loss_mask_count = loss_mask.count_nonzero() or 1
    advantages = advantages.detach()
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    gate_pos = torch.sigmoid(tau_pos * (ratio - 1.0)) * (4.0 / tau_pos)
    gate_neg = torch.sigmoid(tau_neg * (ratio - 1.0)) * (4.0 / tau_neg)
    soft_gate = torch.where(advantages > 0, gate_pos, gate_neg)
    pg_loss = -soft_gate * advantages
    logging_loss = pg_loss.detach()
    pg_loss = torch.where(loss_mask, pg_loss, 0).sum() / loss_mask_count
    stat = dict(loss=logging_loss, importance_weight=ratio.detach(), approx_kl=log_ratio.detach(), sapo_soft_gate=soft_gate.detach())
    return pg_loss, stat


class Actor(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.embed(input_ids))


def gather_logprobs(logits, labels):
    return logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(2070)
    actor = Actor()
    input_ids = torch.randint(0, 20, (14,))  # two packed sequences of seven
    labels = torch.roll(input_ids, shifts=-1)
    loss_mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    with torch.no_grad():
        old_logp = gather_logprobs(actor(input_ids), labels) + 0.05 * torch.randn(14)
    old_logp[9] = -97.0  # sampled ten versions ago, from another mode
    advantages = torch.where(torch.arange(14) < 7, 0.8, -0.8)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
    return SimpleNamespace(
        model=actor,
        optimizer=optimizer,
        input_ids=input_ids,
        labels=labels,
        old_logp=old_logp,
        advantages=advantages,
        loss_mask=loss_mask,
        tau_pos=1.0,
        tau_neg=1.05,
    )


def run(s=None):
    s = s or build()
    logprobs = gather_logprobs(s.model(s.input_ids), s.labels)
    loss, stat = sapo_loss_fn(logprobs, s.old_logp, s.advantages, s.tau_pos, s.tau_neg, s.loss_mask)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.stat = stat
    return loss

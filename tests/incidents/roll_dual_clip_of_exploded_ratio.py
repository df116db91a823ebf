"""Token-level PPO loss with dual clip (RLVR actor), one stale token in a rollout with a negative advantage.

The engine reported a log-prob of about -98 for one sampled token that the trainer finds plausible: the ratio is exp(95) = inf. The dual clip bounds the
objective at 1.4 * A, so loss, KL and all metrics of the loss stay finite; backward sends 0 through max and min into exp: 0 * inf = NaN.

Source: https://github.com/alibaba/ROLL/blob/main/roll/pipeline/rlvr/actor_worker.py (loss_func, importance_sampling "token", dual_clip_loss).
Heals: a bound on the log ratio before exp, or exp of a where-replaced (detached) log ratio.  Does not: dual clip, a tighter pg_clip, torch.where on the loss, gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "exp_overflow"),
    op=("exp",),
    index=(1, 3),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "where_on_detached", "drop_invalid_sample"),
    variable=("ratio",),
    line=("ratio = (log_probs - old_log_probs).exp()",),
)


class Actor(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


def op_compute_log_probs(logits, input_ids):
    return logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def agg_loss(loss_mat, loss_mask):
    seq = (loss_mat * loss_mask).sum(-1) / loss_mask.sum(-1).clamp(min=1)
    return seq.mean()


def build():
    torch.manual_seed(19)
    actor = Actor()
    input_ids = torch.randint(0, 30, (3, 8))
    response_mask = torch.ones(3, 8)
    response_mask[:, :2] = 0
    response_mask[0, 6:] = 0
    with torch.no_grad():
        log_probs = op_compute_log_probs(actor(input_ids), input_ids)
    old_log_probs = log_probs + 0.05 * torch.randn_like(log_probs)
    old_log_probs[1, 3] = log_probs[1, 3] - 95.0
    advantages = torch.tensor([[0.9], [-1.1], [0.2]]).expand(3, 7).contiguous()
    batch = dict(
        input_ids=input_ids, response_mask=response_mask, old_log_probs=old_log_probs, ref_log_probs=log_probs - 0.01, advantages=advantages
    )
    cfg = SimpleNamespace(pg_clip=0.2, dual_clip_loss=True, kl_loss_coef=0.01)
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4), batch=batch, cfg=cfg)


def loss_func(cfg, batch, logits):
    response_mask = batch["response_mask"][:, 1:]
    old_log_probs, advantages = batch["old_log_probs"], batch["advantages"]
    log_probs = op_compute_log_probs(logits, batch["input_ids"])
    kl = batch["ref_log_probs"] - log_probs
    kl_loss = agg_loss(kl.exp() - kl - 1, response_mask)
    ratio = (log_probs - old_log_probs).exp()
    surr1 = ratio * advantages
    surr2 = ratio.clamp(1 - cfg.pg_clip, 1 + cfg.pg_clip) * advantages
    loss = -torch.min(surr1, surr2)
    if cfg.dual_clip_loss:
        dual_clip_loss = -torch.max(-loss, (1 + cfg.pg_clip * 2) * advantages)
        loss = torch.where(advantages < 0, dual_clip_loss, loss)
    return agg_loss(loss, response_mask) + cfg.kl_loss_coef * kl_loss


def run(s=None):
    s = s or build()
    loss = loss_func(s.cfg, s.batch, s.model(s.batch["input_ids"]))
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

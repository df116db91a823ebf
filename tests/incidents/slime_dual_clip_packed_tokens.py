"""Dual clip keeps the loss finite for a stale token with negative advantage, but backward multiplies its zero gradient by an inf ratio."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "exp_overflow"),
    op=("exp",),
    index=(9,),
    masked=True,
    role=("ratio",),
    fix=("clamp_exponent", "mask_before_op"),
    variable=("ratio",),
    line=("ratio = (-ppo_kl).exp()",),
)


class TinyActor(nn.Module):
    def __init__(self, vocab=24, dim=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.output_layer = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        return self.output_layer(torch.tanh(self.embedding(tokens)))


def get_log_probs(logits, tokens, cu_seqlens):
    out = []
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        chunk = logits[start : end - 1].float().log_softmax(dim=-1)
        out.append(chunk.gather(-1, tokens[start + 1 : end, None]).squeeze(-1))
    return out


def compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
    ratio = (-ppo_kl).exp()
    pg_losses1 = -ratio * advantages
    pg_losses2 = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    clipfrac = torch.gt(pg_losses2, pg_losses1).float()
    if eps_clip_c is None:
        return clip_pg_losses1, clipfrac
    pg_losses3 = -eps_clip_c * advantages
    clip_pg_losses2 = torch.min(pg_losses3, clip_pg_losses1)
    return torch.where(advantages < 0, clip_pg_losses2, clip_pg_losses1), clipfrac


def build():
    torch.manual_seed(101)
    actor = TinyActor()
    lengths = [6, 8, 5]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tokens = torch.randint(0, 24, (cu_seqlens[-1],))
    with torch.no_grad():
        old = get_log_probs(actor(tokens), tokens, cu_seqlens)
    old[1] = old[1] + 0.03 * torch.randn_like(old[1])
    old[1][4] = -97.5
    rewards = torch.tensor([0.6, -1.1, 0.5])
    batch = {
        "tokens": tokens,
        "cu_seqlens": cu_seqlens,
        "log_probs": old,
        "advantages": [r.expand(n - 1) for r, n in zip(rewards, lengths)],
        "loss_masks": [torch.ones(n - 1) for n in lengths],
    }
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-5), batch=batch)


def run(s=None):
    s = s or build()
    batch = s.batch
    log_probs = torch.cat(get_log_probs(s.model(batch["tokens"]), batch["tokens"], batch["cu_seqlens"]))
    ppo_kl = torch.cat(batch["log_probs"]) - log_probs
    pg_loss, clipfrac = compute_policy_loss(ppo_kl, torch.cat(batch["advantages"]), 0.2, 0.28, eps_clip_c=3.0)
    loss_mask = torch.cat(batch["loss_masks"])
    loss = (pg_loss * loss_mask).sum() / loss_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

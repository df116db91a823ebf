"""Agent-R1 #30: training collapses; the printed pg_loss is normal, grad_norm is NaN, and torch.clamp on the ratio did not help.

Source: https://github.com/AgentR1/Agent-R1/issues/30 (function: compute_policy_loss of its verl fork, verl/trainer/ppo/core_algos.py).
The decoded response was tokenised again for training, so one token is scored with an old log-prob of another token (-120). Its ratio overflows.
The advantage is positive, so torch.max takes the clipped branch and the loss is finite; the backward of exp gets 0 * inf.
Heals: clamping the log ratio before exp, masking that token's operand, old log-probs of the very token ids, dropping the trajectory.
Tempting and useless: clamping the ratio after exp (ratio.clamp(max=10)); nan_to_num of the loss.
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
    role=("ratio",),
    fix=("clamp_exponent", "fix_upstream", "clamp_input", "mask_before_op", "drop_invalid_sample", "reject_input"),
    variable=("ratio",),
    line=("ratio = torch.exp(negative_approx_kl)",),
)


class Actor(nn.Module):
    def __init__(self, vocab=24, dim=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mixer = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden, _ = self.mixer(self.embed_tokens(input_ids))
        return self.lm_head(hidden)


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


def logprobs_of(actor, input_ids, response_length):
    logits = actor(input_ids)[:, -response_length - 1 : -1]
    labels = input_ids[:, -response_length:]
    return logits.log_softmax(dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def compute_policy_loss(old_log_prob, log_prob, advantages, eos_mask, cliprange):
    negative_approx_kl = log_prob - old_log_prob
    ratio = torch.exp(negative_approx_kl)
    ppo_kl = masked_mean(-negative_approx_kl, eos_mask)

    pg_losses = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)

    pg_loss = masked_mean(torch.max(pg_losses, pg_losses2), eos_mask)
    pg_clipfrac = masked_mean(torch.gt(pg_losses2, pg_losses).float(), eos_mask)
    return pg_loss, pg_clipfrac, ppo_kl


def build():
    torch.manual_seed(30)
    model = Actor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    input_ids = torch.randint(1, 24, (4, 10))
    response_mask = torch.ones(4, 6)
    response_mask[2, 4:] = 0
    with torch.no_grad():
        old_log_probs = logprobs_of(model, input_ids, 6) + 0.02 * torch.randn(4, 6)
    old_log_probs[1, 3] = -120.0  # "\n\n" became two tokens when the text was tokenised again
    advantages = torch.tensor([-0.7, 1.3, 0.2, -0.8]).unsqueeze(-1).expand(4, 6) * response_mask
    batch = dict(input_ids=input_ids, response_mask=response_mask, old_log_probs=old_log_probs, advantages=advantages)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, clip_ratio=0.2, max_grad_norm=1.0)


def run(s=None):
    s = s or build()
    log_prob = logprobs_of(s.model, s.batch["input_ids"], 6)
    pg_loss, s.pg_clipfrac, s.ppo_kl = compute_policy_loss(
        s.batch["old_log_probs"], log_prob, s.batch["advantages"], s.batch["response_mask"], s.clip_ratio
    )
    s.optimizer.zero_grad()
    pg_loss.backward()
    s.grad_norm = nn.utils.clip_grad_norm_(s.model.parameters(), s.max_grad_norm)
    s.optimizer.step()
    return pg_loss

"""ICEPOP rejects a stale token by multiplying its overflowed importance weight with the boolean filter, and inf * 0 is NaN.
https://github.com/OpenRLHF/OpenRLHF/pull/1314
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(0, 4),
    masked=True,
    role=("is_weight", "ratio"),
    fix=("clamp_exponent", "mask_before_op"),
    variable=("vllm_is",),
    line=("vllm_is = torch.exp(old_log_probs - rollout_log_probs).detach()",),
)


class TokenPolicy(nn.Module):
    def __init__(self, vocab=21, dim=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        hidden, _ = self.gru(self.emb(ids[:, :-1]))
        return self.out(hidden).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def policy_loss(log_probs, old_log_probs, rollout_log_probs, advantages, action_mask, low=0.5, high=5.0):
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    vllm_is = torch.exp(old_log_probs - rollout_log_probs).detach()
    vllm_is_filter = (vllm_is >= low) & (vllm_is <= high)
    vllm_is = vllm_is * vllm_is_filter
    loss = vllm_is * loss
    return (loss * action_mask).sum() / action_mask.sum()


def build():
    torch.manual_seed(1314)
    model = TokenPolicy()
    ids = torch.randint(0, 21, (2, 8))
    with torch.no_grad():
        old_log_probs = model(ids)
    rollout_log_probs = old_log_probs + 0.05 * torch.randn_like(old_log_probs)
    rollout_log_probs[0, 4] = -640.0
    rollout_log_probs[1, 1] = old_log_probs[1, 1] - 2.5  # also rejected, harmlessly
    action_mask = torch.ones_like(old_log_probs)
    action_mask[1, 5:] = 0
    batch = dict(
        old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, advantages=torch.tensor([[0.9], [-0.3]]), action_mask=action_mask
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-6), ids=ids, batch=batch)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = policy_loss(s.model(s.ids), **s.batch)
    loss.backward()
    s.optimizer.step()
    return loss

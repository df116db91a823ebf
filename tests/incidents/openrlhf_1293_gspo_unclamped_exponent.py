"""GSPO computes a clamped log ratio but exponentiates the unclamped sequence mean, so one stale sequence gives an infinite ratio.
https://github.com/OpenRLHF/OpenRLHF/pull/1293
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(2,),
    masked=False,
    role=("ratio",),
    fix=("clamp_exponent",),
    variable=("ratio",),
    line=("ratio = seq_log_ratio.exp()",),
)


class PolicyLoss(nn.Module):
    def __init__(self, clip_eps_low=0.2, clip_eps_high=0.2, policy_loss_type="gspo"):
        super().__init__()
        self.clip_eps_low, self.clip_eps_high = clip_eps_low, clip_eps_high
        self.policy_loss_type = policy_loss_type

    def forward(self, log_probs, old_log_probs, advantages, action_mask):
        raw_policy_log_ratio = log_probs - old_log_probs
        policy_log_ratio = raw_policy_log_ratio.clamp(min=-20.0, max=20.0)
        if self.policy_loss_type == "ppo":
            ratio = policy_log_ratio.exp()
        else:
            log_ratio = raw_policy_log_ratio
            seq_log_ratio = (log_ratio * action_mask).sum(dim=-1) / action_mask.sum(dim=-1).clamp(min=1)
            ratio = seq_log_ratio.exp()
            ratio = ratio.unsqueeze(-1) * action_mask
        surr1 = ratio * advantages
        surr2 = ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high) * advantages
        loss = -torch.min(surr1, surr2)
        return ((loss * action_mask).sum(-1) / action_mask.sum(-1)).mean()


def build():
    torch.manual_seed(1293)
    model = nn.Sequential(nn.Embedding(24, 12), nn.Tanh(), nn.Linear(12, 24))
    ids = torch.randint(0, 24, (4, 8))
    action_mask = torch.ones(4, 7)
    action_mask[0, 5:] = 0
    action_mask[3, 3:] = 0
    with torch.no_grad():
        logp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    old = logp + 0.02 * torch.randn_like(logp)
    old[2] = logp[2] - 94.0 + torch.randn(7)  # rolled out under a very different prompt template
    batch = {"ids": ids, "old_log_probs": old, "advantages": torch.tensor([[0.5], [1.2], [-1.1], [-0.6]]), "action_mask": action_mask}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), batch=batch, loss_fn=PolicyLoss())


def run(s=None):
    s = s or build()
    b = s.batch
    log_probs = s.model(b["ids"][:, :-1]).log_softmax(-1).gather(-1, b["ids"][:, 1:, None]).squeeze(-1)
    loss = s.loss_fn(log_probs, b["old_log_probs"], b["advantages"], b["action_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

"""The k3 estimator caps its output at 10 after the exponential, so a drifted token leaves a finite KL and a NaN gradient.
https://github.com/OpenRLHF/OpenRLHF/pull/1335
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
    masked=None,  # the token counts, and clamp rejects its value
    role=("kl",),
    fix=("clamp_exponent",),
    variable=("log_ratio",),
    line=("log_ratio = torch.exp(neg)",),
)


class Actor(nn.Module):
    def __init__(self, vocab=18, dim=10):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, sequences, num_actions):
        logits = self.lm_head(self.wte(sequences))[:, :-1]
        log_probs = torch.log_softmax(logits.float(), dim=-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)
        return log_probs[:, -num_actions:]


def compute_approx_kl(log_probs, log_probs_base, kl_estimator="k3"):
    log_ratio = log_probs.float() - log_probs_base.float()
    if kl_estimator == "k2":
        log_ratio = log_ratio**2 / 2.0
    if kl_estimator == "k3":
        neg = -log_ratio
        log_ratio = torch.exp(neg)
        log_ratio = log_ratio - 1 - neg
    return log_ratio.clamp(min=-10, max=10)


def masked_mean(tensor, mask):
    return (tensor * mask).sum() / mask.sum()


class PolicyLoss(nn.Module):
    def __init__(self, clip_eps=0.2):
        super().__init__()
        self.clip_eps = clip_eps

    def forward(self, log_probs, old_log_probs, advantages, action_mask):
        ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0).exp()
        surr1 = ratio * advantages
        surr2 = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps) * advantages
        return masked_mean(-torch.min(surr1, surr2), action_mask)


def build():
    torch.manual_seed(1335)
    actor, reference = Actor(), Actor()
    reference.load_state_dict(actor.state_dict())
    reference.requires_grad_(False)
    with torch.no_grad():
        actor.lm_head.bias[11] = -131.0  # thousands of steps of pressure against one token
    sequences = torch.randint(0, 10, (3, 9))
    sequences[1, 6] = 11
    action_mask = torch.ones(3, 6)
    action_mask[0, 4:] = 0
    advantages = torch.tensor([[0.8], [-0.4], [0.1]]).expand(3, 6)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-6)
    return SimpleNamespace(
        model=actor, reference=reference, optimizer=optimizer, batch=(sequences, action_mask, advantages), criterion=PolicyLoss()
    )


def run(s=None):
    s = s or build()
    sequences, action_mask, advantages = s.batch
    num_actions = action_mask.shape[1]
    base_action_log_probs = s.reference(sequences, num_actions)
    action_log_probs = s.model(sequences, num_actions)
    actor_loss = s.criterion(action_log_probs, action_log_probs.detach(), advantages, action_mask)
    kl = compute_approx_kl(action_log_probs, base_action_log_probs)
    loss = actor_loss + 1e-2 * masked_mean(kl, action_mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

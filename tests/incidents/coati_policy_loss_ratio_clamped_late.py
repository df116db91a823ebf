"""ColossalChat, coati PolicyLoss
(https://github.com/hpcaitech/ColossalAI/blob/main/applications/ColossalChat/coati/models/loss.py): the ratio is clamped to [0, 10] after the
exp. A token of a rejected answer that the old policy found next to impossible overflows in exp; the clamp makes the loss finite and the
backward multiplies the clamp's 0 by exp's infinite derivative. (The skip by the mean ratio is switched off, as in forks with dropout.)

Heals: clamp the log ratio before exp. Does not heal: a lower bound in the clamp of the ratio, or nan_to_num on the ratio.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "exp_overflow"),
    op=("exp",),
    index=(1, 2),
    masked=None,
    role=("ratio",),
    fix=("clamp_exponent", "mask_before_op", "drop_invalid_sample", "clamp_input"),
    variable=("ratio_",),
    line=("ratio_ = ((log_probs - old_log_probs) * action_mask).exp()",),
)


def masked_mean(tensor, mask, dim=1):
    tensor = tensor * mask
    return tensor.sum(dim=dim) / (mask.sum(dim=dim) + 1e-8)


def calc_action_log_probs(logits, sequences, num_actions):
    log_probs = torch.log_softmax(logits[:, :-1, :], dim=-1)
    return log_probs.gather(dim=-1, index=sequences[:, 1:].unsqueeze(-1)).squeeze(-1)[:, -num_actions:]


class PolicyLoss(nn.Module):
    def __init__(self, clip_eps=0.2):
        super().__init__()
        self.clip_eps = clip_eps

    def forward(self, log_probs, old_log_probs, advantages, action_mask):
        ratio_ = ((log_probs - old_log_probs) * action_mask).exp()
        ratio = ratio_.clamp(0.0, 10.0)
        surr1 = ratio * advantages
        surr2 = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps) * advantages
        loss = -torch.min(surr1, surr2)
        loss = masked_mean(loss, action_mask)
        return loss.mean(), ratio_.detach().max()


class Actor(nn.Module):
    def __init__(self, vocab=22, dim=14):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.block = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, sequences):
        h = self.wte(sequences)
        return self.lm_head(h + self.block(h))


def build():
    torch.manual_seed(3316)
    actor = Actor()
    sequences = torch.randint(0, 22, (3, 9))
    with torch.no_grad():
        old_log_probs = calc_action_log_probs(actor(sequences), sequences, 5)
    old_log_probs[1, 2] = -98.0
    action_mask = torch.ones(3, 5)
    action_mask[2, 3:] = 0
    advantages = torch.tensor([[0.8], [-1.1], [0.3]]).expand(3, 5)
    return SimpleNamespace(
        model=actor,
        optimizer=torch.optim.Adam(actor.parameters(), lr=1e-5),
        actor_loss_fn=PolicyLoss(),
        sequences=sequences,
        old_log_probs=old_log_probs,
        advantages=advantages,
        action_mask=action_mask,
    )


def run(s=None):
    s = s or build()
    action_log_probs = calc_action_log_probs(s.model(s.sequences), s.sequences, 5)
    actor_loss, s.max_ratio = s.actor_loss_fn(action_log_probs, s.old_log_probs, s.advantages, s.action_mask)
    s.optimizer.zero_grad()
    actor_loss.backward()
    s.optimizer.step()
    return actor_loss


if __name__ == "__main__":
    print(run().item())

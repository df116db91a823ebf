"""Adaptive KL control with the error clipped to ±0.2, as Ziegler et al. have it, and a horizon of a few tokens where thousands are meant: while the
policy is far from its target each step multiplies the coefficient by 1 + 0.2 · tokens / horizon. Long before Python's float ends it leaves float32,
in which the loss is: as a factor it is infinite there, and the penalty with it, although neither the KL nor the coefficient is.

The setting is wrong: a horizon that fits, or an upper end for the coefficient. A clamp of the KL leaves an infinite product.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("bad_input",),
    op=("mul",),
    index=(),
    masked=None,
    role=("kl", "loss", None),
    fix=("validate_config",),
    variable=("kl_loss",),
    line=("kl_loss = masked_mean(kld, s.mask) * s.kl_ctl.value",),
)


class AdaptiveKLController:
    def __init__(self, init_kl_coef, target_kl, horizon):
        self.value, self.target, self.horizon = init_kl_coef, target_kl, horizon

    def update(self, current_kl, n_steps):
        proportional_error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + proportional_error * n_steps / self.horizon


def build():
    torch.manual_seed(17)
    actor = nn.Sequential(nn.Embedding(20, 10), nn.Tanh(), nn.Linear(10, 20))
    reference = nn.Sequential(nn.Embedding(20, 10), nn.Tanh(), nn.Linear(10, 20))
    mask = torch.ones(5, 6)
    mask[1, 4:] = 0
    return SimpleNamespace(
        actor=actor,
        reference=reference,
        responses=torch.randint(0, 20, (5, 6)),
        mask=mask,
        advantages=torch.randn(5, 1),
        kl_ctl=AdaptiveKLController(init_kl_coef=1e38, target_kl=0.02, horizon=1.0),  # late in the run
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-3),
    )


def log_probs_of(model, responses):
    return F.log_softmax(model(responses), dim=-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def run(s=None):
    s = s or build()
    log_prob = log_probs_of(s.actor, s.responses)
    with torch.no_grad():
        ref_log_prob = log_probs_of(s.reference, s.responses)
    pg_loss = -masked_mean(torch.exp(log_prob - log_prob.detach()) * s.advantages, s.mask)
    kld = 0.5 * (log_prob - ref_log_prob).square()
    s.kl_ctl.update(masked_mean(kld, s.mask).item(), n_steps=int(s.mask.sum()))
    kl_loss = masked_mean(kld, s.mask) * s.kl_ctl.value
    loss = pg_loss + kl_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

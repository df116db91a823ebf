"""Adaptive KL control after Ziegler et al. with the error left unclipped and no upper end: while the policy is far from its target the coefficient
is multiplied by 1 + error / horizon in every step. A horizon in thousands of samples was given in single ones, so the coefficient grows tenfold a
step until Python's float is infinite. Its product with the KL is +inf; neither the KL nor the loss beside it is large.

The setting is wrong: an upper end for the coefficient, and the clip of the error, keep it finite. No sample of the batch has part in it, and a clamp
of the KL leaves an infinite product.
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
    role=("loss", "kl", None),
    fix=("validate_config",),
    variable=("penalty",),
    line=("penalty = s.kl_ctl.value * mean_kl",),
)


class AdaptiveKLController:
    def __init__(self, init_kl_coef, target, horizon):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current, n_steps):
        error = current / self.target - 1
        self.value *= 1 + error * n_steps / self.horizon


def build():
    torch.manual_seed(11)
    policy = nn.Sequential(nn.Embedding(16, 12), nn.Tanh(), nn.Linear(12, 16))
    reference = nn.Sequential(nn.Embedding(16, 12), nn.Tanh(), nn.Linear(12, 16))
    tokens = torch.randint(0, 16, (4, 7))
    kl_ctl = AdaptiveKLController(init_kl_coef=1e307, target=0.01, horizon=10.0)  # late in the run
    return SimpleNamespace(
        policy=policy,
        reference=reference,
        tokens=tokens,
        advantages=torch.randn(4, 1),
        kl_ctl=kl_ctl,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-3),
    )


def gathered(model, tokens):
    return F.log_softmax(model(tokens), dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def run(s=None):
    s = s or build()
    log_probs = gathered(s.policy, s.tokens)
    with torch.no_grad():
        ref_log_probs = gathered(s.reference, s.tokens)
    log_ratio = ref_log_probs - log_probs
    mean_kl = (torch.exp(log_ratio) - log_ratio - 1).mean()
    s.kl_ctl.update(mean_kl.item(), n_steps=s.tokens.numel())
    penalty = s.kl_ctl.value * mean_kl
    loss = -(torch.exp(log_probs - log_probs.detach()) * s.advantages).mean() + penalty
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""HARL HAPPO - the importance weight is the product of the ratios of all action dimensions; dead agents are masked afterwards.

A dead agent's row keeps the action and the log-probs of its last command, for an observation that is now zero: the log-ratio of every
dimension is large. Each exp is finite, torch.prod over the dimensions is not. The advantage of the row is negative, so that min takes the
unclipped branch, and the active mask multiplies -inf by 0.
Heals: zero log-ratio for inactive rows before exp, or a bound of the exponent. Does not: torch.where on the finished surrogate, clamping the
product, exp of the summed log-ratio.
Source: https://github.com/PKU-MARL/HARL harl/algorithms/actors/happo.py (HAPPO.update)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "seq_ratio_overflow", "exp_overflow", "magnitude_overflow"),
    op=("prod",),
    index=(4, 0),
    masked=True,
    role=("is_weight", "ratio"),
    fix=("mask_before_op", "clamp_exponent", "clamp_input", "drop_invalid_sample"),
    variable=("imp_weights",),
    line=("imp_weights = torch.prod(torch.exp(action_log_probs - s.old_action_log_probs), dim=-1, keepdim=True)",),
)


class Actor(nn.Module):
    def __init__(self, obs_dim=6, action_dim=4):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(obs_dim, 16), nn.Tanh())
        self.fc_mean = nn.Linear(16, action_dim)
        self.log_std = nn.Parameter(torch.full((action_dim,), -0.5))

    def evaluate_actions(self, obs, actions, active_masks):
        mean = self.fc_mean(self.base(obs))
        dist = Normal(mean, self.log_std.exp().expand_as(mean))
        entropy = (dist.entropy() * active_masks).sum() / active_masks.sum()
        return dist.log_prob(actions), entropy


def build():
    torch.manual_seed(31)
    actor = Actor()
    obs, active_masks = torch.randn(6, 6), torch.ones(6, 1)
    active_masks[4] = 0.0
    obs[4] = 0.0
    with torch.no_grad():
        mean = actor.fc_mean(actor.base(obs))
        actions = mean + 0.6 * torch.randn_like(mean)
        old_action_log_probs = Normal(mean, 0.6).log_prob(actions) + 0.05 * torch.randn_like(mean)
        old_action_log_probs[4] = torch.tensor([-31.0, -28.0, -35.0, -30.0])  # of the command before its death
    return SimpleNamespace(
        model=actor,
        obs=obs,
        actions=actions,
        active_masks=active_masks,
        old_action_log_probs=old_action_log_probs,
        adv_targ=torch.tensor([[0.4], [-0.9], [1.3], [-0.2], [-0.6], [0.1]]),
        factor=torch.tensor([[1.0], [1.1], [0.9], [1.0], [1.0], [0.95]]),
        optimizer=torch.optim.Adam(actor.parameters(), lr=5e-4, eps=1e-5),
    )


def run(s=None, clip_param=0.2, entropy_coef=0.01):
    s = s or build()
    action_log_probs, dist_entropy = s.model.evaluate_actions(s.obs, s.actions, s.active_masks)
    imp_weights = torch.prod(torch.exp(action_log_probs - s.old_action_log_probs), dim=-1, keepdim=True)
    surr1 = imp_weights * s.adv_targ
    surr2 = torch.clamp(imp_weights, 1.0 - clip_param, 1.0 + clip_param) * s.adv_targ
    policy_action_loss = -torch.sum(s.factor * torch.min(surr1, surr2), dim=-1, keepdim=True) * s.active_masks
    policy_loss = policy_action_loss.sum() / s.active_masks.sum()
    loss = policy_loss - dist_entropy * entropy_coef
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss

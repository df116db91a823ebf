"""on-policy's R-MAPPO marks the advantages of dead agents with NaN in a copy and takes nanmean / nanstd of it: the statistics count
only live agents. The NaNs stay in the copy; the advantages that the loss reads are finite and inactive steps are multiplied by 0.

    https://github.com/marlbenchmark/on-policy/blob/main/onpolicy/algorithms/r_mappo/r_mappo.py

Healthy: loss, gradients and weights are finite and right.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Categorical


class R_Actor(nn.Module):
    def __init__(self, obs_dim=6, actions=5, hidden=16):
        super().__init__()
        self.base = nn.Sequential(nn.LayerNorm(obs_dim), nn.Linear(obs_dim, hidden), nn.ReLU())
        self.act = nn.Linear(hidden, actions)

    def evaluate_actions(self, obs, action, available):
        logits = self.act(self.base(obs)).masked_fill(~available, -1e10)
        dist = Categorical(logits=logits)
        return dist.log_prob(action), dist.entropy()


def nanstd(x):
    mean = torch.nanmean(x)
    return torch.nanmean((x - mean).square()).sqrt()


def normalized_advantages(returns, value_preds, active_masks):
    advantages = returns - value_preds
    advantages_copy = advantages.clone()
    advantages_copy[active_masks == 0.0] = float("nan")
    mean_advantages = torch.nanmean(advantages_copy)
    std_advantages = nanstd(advantages_copy)
    return (advantages - mean_advantages) / (std_advantages + 1e-5)


def build():
    torch.manual_seed(11)
    model = R_Actor()
    steps, agents = 7, 3
    active = torch.ones(steps, agents)
    active[4:, 1] = 0.0
    active[2:, 2] = 0.0
    obs = torch.randn(steps, agents, 6) * active.unsqueeze(-1)
    available = torch.rand(steps, agents, 5) > 0.3
    available[..., 0] = True
    action = torch.zeros(steps, agents, dtype=torch.long)
    with torch.no_grad():
        old_log_probs, _ = model.evaluate_actions(obs, action, available)
    return SimpleNamespace(
        model=model,
        obs=obs,
        available=available,
        action=action,
        old_log_probs=old_log_probs,
        active=active,
        returns=torch.randn(steps, agents),
        value_preds=torch.randn(steps, agents),
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-4, eps=1e-5),
    )


def run(s=None):
    s = s or build()
    adv_targ = normalized_advantages(s.returns, s.value_preds, s.active)
    log_probs, entropy = s.model.evaluate_actions(s.obs, s.action, s.available)
    imp_weights = torch.exp(log_probs - s.old_log_probs)
    surr = torch.min(imp_weights * adv_targ, imp_weights.clamp(0.8, 1.2) * adv_targ)
    policy_loss = (-surr * s.active).sum() / s.active.sum()
    dist_entropy = (entropy * s.active).sum() / s.active.sum()
    loss = policy_loss - 0.01 * dist_entropy
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

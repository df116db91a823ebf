"""V-trace of torchbeast: the importance weights exp(log_rhos) are clipped at 1 before anything is made of them, all without gradient.

The behaviour policy of one actor was far behind and its log-probability of an action is -131, so the ratio is inf. Both uses of it are
clamp(max=1.0): the targets and the advantages are finite. The mean ratio is also logged, and shows inf; nobody else reads it.

Source: https://github.com/facebookresearch/torchbeast/blob/main/torchbeast/core/vtrace.py (from_importance_weights)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class AtariNet(nn.Module):
    def __init__(self, obs_dim=10, num_actions=4):
        super().__init__()
        self.core = nn.Sequential(nn.Linear(obs_dim, 32), nn.ReLU())
        self.policy = nn.Linear(32, num_actions)
        self.baseline = nn.Linear(32, 1)

    def forward(self, frame):
        core_output = self.core(frame)
        return self.policy(core_output), self.baseline(core_output).squeeze(-1)


def action_log_probs(policy_logits, actions):
    return -F.cross_entropy(policy_logits.flatten(0, 1), actions.flatten(), reduction="none").view_as(actions)


@torch.no_grad()
def from_importance_weights(log_rhos, discounts, rewards, values, bootstrap_value, clip_rho_threshold=1.0):
    rhos = torch.exp(log_rhos)
    clipped_rhos = torch.clamp(rhos, max=clip_rho_threshold)
    cs = torch.clamp(rhos, max=1.0)
    values_t_plus_1 = torch.cat([values[1:], bootstrap_value.unsqueeze(0)], dim=0)
    deltas = clipped_rhos * (rewards + discounts * values_t_plus_1 - values)
    acc = torch.zeros_like(bootstrap_value)
    result = []
    for t in range(discounts.shape[0] - 1, -1, -1):
        acc = deltas[t] + discounts[t] * cs[t] * acc
        result.append(acc)
    vs = torch.stack(result[::-1]) + values
    vs_t_plus_1 = torch.cat([vs[1:], bootstrap_value.unsqueeze(0)], dim=0)
    pg_advantages = clipped_rhos * (rewards + discounts * vs_t_plus_1 - values)
    return vs, pg_advantages, rhos.mean()


def build():
    torch.manual_seed(2153)
    model = AtariNet()
    T, B = 6, 4
    frame = torch.randn(T + 1, B, 10)
    actions = torch.randint(0, 4, (T, B))
    with torch.no_grad():
        behavior_logp = action_log_probs(model(frame[:-1])[0], actions) + 0.1 * torch.randn(T, B)
    behavior_logp[4, 2] = -131.0
    return SimpleNamespace(
        model=model,
        frame=frame,
        actions=actions,
        behavior_logp=behavior_logp,
        rewards=torch.randn(T, B),
        discounts=torch.full((T, B), 0.99),
        optimizer=torch.optim.RMSprop(model.parameters(), lr=4.8e-4, alpha=0.99, eps=0.01),
    )


def run(s=None):
    s = s or build()
    policy_logits, baseline = s.model(s.frame)
    target_logp = action_log_probs(policy_logits[:-1], s.actions)
    log_rhos = (target_logp - s.behavior_logp).detach()
    vs, pg_advantages, s.mean_rho = from_importance_weights(log_rhos, s.discounts, s.rewards, baseline[:-1].detach(), baseline[-1].detach())
    pg_loss = -(target_logp * pg_advantages).sum()
    baseline_loss = 0.5 * ((vs - baseline[:-1]) ** 2).sum()
    policy = F.softmax(policy_logits[:-1], dim=-1)
    entropy_loss = (policy * F.log_softmax(policy_logits[:-1], dim=-1)).sum()
    total_loss = pg_loss + 0.5 * baseline_loss + 0.0006 * entropy_loss
    s.optimizer.zero_grad()
    total_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 40.0)
    s.optimizer.step()
    return total_loss

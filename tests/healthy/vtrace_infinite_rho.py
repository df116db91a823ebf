"""Healthy. V-trace on very stale data: an action that the actor all but never took is now likely, its importance weight overflows to inf,
and another has log-prob -inf under the learner (masked as illegal now) and weight 0. Both clips bring the weights to 1, everything here is
under no_grad, and the padded tail of the illegal step is not trained on.
Style of facebookresearch/torchbeast, torchbeast/core/vtrace.py, from_importance_weights. Weights and gradients end finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class AtariNet(nn.Module):
    def __init__(self, obs=6, actions=4):
        super().__init__()
        self.core = nn.Sequential(nn.Linear(obs, 16), nn.ReLU())
        self.policy, self.baseline = nn.Linear(16, actions), nn.Linear(16, 1)

    def forward(self, frame, legal):
        core = self.core(frame)
        logits = self.policy(core).masked_fill(~legal, float("-inf"))
        return logits, self.baseline(core).squeeze(-1)


def action_log_probs(policy_logits, actions):
    return F.log_softmax(policy_logits, dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def from_importance_weights(log_rhos, discounts, rewards, values, bootstrap_value, clip_rho=1.0, clip_pg_rho=1.0):
    rhos = torch.exp(log_rhos)
    clipped_rhos = torch.clamp(rhos, max=clip_rho)
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
    pg_advantages = torch.clamp(rhos, max=clip_pg_rho) * (rewards + discounts * vs_t_plus_1 - values)
    return vs, pg_advantages


def build():
    torch.manual_seed(1802)
    model = AtariNet()
    T, B = 5, 3
    behavior = -0.5 - torch.rand(T, B)
    behavior[1, 2] = -140.0  # the actor's policy was almost certain of something else
    legal = torch.ones(T, B, 4, dtype=torch.bool)
    legal[4, 0, 3] = False
    actions = torch.randint(0, 3, (T, B))
    actions[4, 0] = 3
    train = torch.ones(T, B, dtype=torch.bool)
    train[4, 0] = False
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=0.01),
        batch=dict(
            frame=torch.randn(T, B, 6),
            legal=legal,
            action=actions,
            behavior_logp=behavior,
            train=train,
            reward=torch.randn(T, B),
            discount=torch.full((T, B), 0.99),
            bootstrap=torch.randn(B),
        ),
    )


def run(s=None):
    s = s or build()
    b = s.batch
    logits, baseline = s.model(b["frame"], b["legal"])
    target_logp = action_log_probs(logits, b["action"])
    log_rhos = target_logp.detach() - b["behavior_logp"]
    vs, pg_advantages = from_importance_weights(log_rhos, b["discount"], b["reward"], baseline, b["bootstrap"])
    pg_loss = -(target_logp[b["train"]] * pg_advantages[b["train"]]).sum()
    baseline_loss = 0.5 * (vs - baseline)[b["train"]].square().sum()
    loss = pg_loss + 0.5 * baseline_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 40.0)
    s.optimizer.step()
    return loss

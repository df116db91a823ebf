"""HARL's HAPPO: the steps after an agent's death are left out of its loss by active_masks. The environment writes NaN into the health ratio of
a dead unit (0 / 0 there), the actor runs on these rows too, and NaN times the mask of 0 is NaN.

https://github.com/PKU-MARL/HARL/blob/main/harl/algorithms/actors/happo.py (HAPPO.update, use_policy_active_masks)

Heals: zeros in the rows of a dead agent before the network, or selecting the live rows first. Does not: torch.where(active, loss, 0) instead
of the product: the loss is finite then, the gradient of the shared weights still is NaN. Clipping the gradient spreads it.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("nan_times_zero_mask", "bad_input"),
    op=("input", "linear", "addmm", "tensor"),
    index=(4, 2),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "drop_invalid_sample", "reject_input", "fix_upstream"),
    variable=("obs_batch", "obs"),
    line=("return self.act(self.base(obs))", "obs = torch.tensor(collect_observations())"),
)


class StochasticPolicy(nn.Module):
    def __init__(self, obs_dim=5, actions=4, hidden=16):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh())
        self.act = nn.Linear(hidden, actions)

    def forward(self, obs):
        return self.act(self.base(obs))

    def evaluate_actions(self, obs, action, available_actions, active_masks):
        logits = self(obs).masked_fill(available_actions == 0, -1e10)
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
        dist_entropy = (entropy * active_masks).sum() / active_masks.sum()
        return log_probs.gather(-1, action), dist_entropy


def update(s, sample, clip_param=0.2, entropy_coef=0.01):
    action_log_probs, dist_entropy = s.model.evaluate_actions(
        sample["obs_batch"], sample["actions_batch"], sample["available_actions_batch"], sample["active_masks_batch"]
    )
    imp_weights = torch.prod(torch.exp(action_log_probs - sample["old_action_log_probs_batch"]), dim=-1, keepdim=True)
    surr1 = imp_weights * sample["adv_targ"]
    surr2 = torch.clamp(imp_weights, 1.0 - clip_param, 1.0 + clip_param) * sample["adv_targ"]
    policy_action_loss = -torch.sum(sample["factor_batch"] * torch.min(surr1, surr2), dim=-1, keepdim=True)
    policy_loss = (policy_action_loss * sample["active_masks_batch"]).sum() / sample["active_masks_batch"].sum()
    s.optimizer.zero_grad()
    (policy_loss - dist_entropy * entropy_coef).backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return policy_loss


def collect_observations():
    nan = float("nan")  # health / max_health of a unit that is gone
    return [  # position x and y, health ratio, distance to the enemy, weapon cooldown
        [0.12, 0.50, 1.00, 0.81, 0.00],
        [0.20, 0.52, 0.69, 0.64, 0.50],
        [0.31, 0.55, 0.27, 0.41, 0.25],
        [0.33, 0.57, 0.07, 0.30, 0.75],
        [0.00, 0.00, nan, 0.00, 0.00],
        [0.00, 0.00, nan, 0.00, 0.00],
        [0.11, 0.49, 1.00, 0.83, 0.00],
    ]


def build():
    torch.manual_seed(2209)
    model = StochasticPolicy()
    obs = torch.tensor(collect_observations())
    steps = len(obs)
    actions = torch.randint(1, 4, (steps, 1))
    available_actions = torch.ones(steps, 4)
    active_masks = torch.ones(steps, 1)
    active_masks[4:6] = 0.0  # the agent dies at step 4, the next episode begins at step 6
    with torch.no_grad():
        old_log_probs, _ = model.evaluate_actions(obs, actions, available_actions, active_masks)
    actions[4:6] = 0
    available_actions[4:6] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # only no-op
    old_log_probs[4:6] = 0.0
    sample = dict(
        obs_batch=obs,
        actions_batch=actions,
        available_actions_batch=available_actions,
        active_masks_batch=active_masks,
        old_action_log_probs_batch=old_log_probs,
        adv_targ=torch.randn(steps, 1),
        factor_batch=torch.ones(steps, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, eps=1e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, sample=sample)


def run(s=None):
    s = s or build()
    return update(s, s.sample)


if __name__ == "__main__":
    run()

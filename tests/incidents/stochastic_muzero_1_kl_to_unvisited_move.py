"""Stochastic-muzero #1 / muzero-general #193 - KL of the predicted policy to the visit counts of the search.

The search never visited one legal move, so its target probability is exactly 0 and the log of the target is -inf. The prediction gives the
move some mass: the loss is +inf and the gradients are NaN. Source: https://github.com/DHDev0/Stochastic-muzero/issues/1 ("loss is nan from
the beginning", the loss lacked the transform that clamps vanishing probabilities), form of
https://github.com/werner-duvaud/muzero-general/issues/193. Clamping the target heals; clamping the prediction only does not, nor does
nan_to_num on the loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2, 3),
    masked=None,
    role=("log_probs", "ref_log_probs", "kl", "rollout_log_probs"),
    fix=("clamp_input", "mask_before_op", "finite_mask_fill", "representable_eps", "drop_invalid_sample", "stable_function"),
    variable=("log_target",),
    line=("log_target = target_policy.log()",),
)


class MuZeroNet(nn.Module):
    def __init__(self, obs_dim=8, num_actions=5, hidden=24):
        super().__init__()
        self.num_actions = num_actions
        self.representation = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ELU())
        self.dynamics = nn.Sequential(nn.Linear(hidden + num_actions, hidden), nn.ELU())
        self.policy = nn.Linear(hidden, num_actions)
        self.value = nn.Linear(hidden, 1)

    def initial_inference(self, obs):
        h = self.representation(obs)
        return h, self.policy(h), self.value(h).squeeze(-1)

    def recurrent_inference(self, h, action):
        h = self.dynamics(torch.cat([h, F.one_hot(action, self.num_actions).float()], -1))
        return h, self.policy(h), self.value(h).squeeze(-1)


def policy_loss_fn(policy_logits, target_policy):
    log_prob = F.log_softmax(policy_logits, dim=-1)
    log_target = target_policy.log()
    return (log_prob.exp() * (log_prob - log_target)).sum(-1)


def build():
    torch.manual_seed(31)
    model = MuZeroNet()
    visits = torch.tensor(
        [
            [[10.0, 4.0, 20.0, 6.0, 10.0], [9.0, 9.0, 12.0, 10.0, 10.0]],
            [[3.0, 30.0, 5.0, 7.0, 5.0], [8.0, 11.0, 11.0, 12.0, 8.0]],
            [[12.0, 14.0, 23.0, 0.0, 1.0], [10.0, 10.0, 10.0, 10.0, 10.0]],  # the fourth move of this root was never tried
            [[22.0, 4.0, 6.0, 8.0, 10.0], [20.0, 7.0, 9.0, 6.0, 8.0]],
        ]
    )
    batch = SimpleNamespace(
        obs=torch.randn(4, 8),
        actions=torch.tensor([2, 1, 0, 0]),
        target_policy=visits / visits.sum(-1, keepdim=True),
        target_value=torch.randn(4, 2) * 0.3,
    )
    return SimpleNamespace(model=model, batch=batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))


def run(s=None):
    s = s or build()
    b = s.batch
    h, policy_logits, value = s.model.initial_inference(b.obs)
    policy_loss = policy_loss_fn(policy_logits, b.target_policy[:, 0])
    value_loss = (value - b.target_value[:, 0]).pow(2)
    h, policy_logits, value = s.model.recurrent_inference(h, b.actions)
    policy_loss = policy_loss + policy_loss_fn(policy_logits, b.target_policy[:, 1])
    value_loss = value_loss + (value - b.target_value[:, 1]).pow(2)
    loss = (policy_loss + 0.25 * value_loss).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""CleanRL TD3 - the next observation of a terminal transition is NaN and (1 - done) is trusted to remove it.

The simulator diverges, reports a NaN state and ends the episode; the transition is stored with done = 1 and reward as usual. The TD target
multiplies the bootstrap value with 1 - done, but NaN * 0 is NaN: target, both critics' losses and their weights.
Source: function of https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/td3_continuous_action.py (target of the critics, re-expressed)

Heals: zero the next observation of terminal rows before the target networks read it, choose with where on the (detached) target, drop the row.
Does not: clamp the target to the possible returns (a clamped NaN is NaN), or clip gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("nan_times_zero_mask", "bad_input"),
    op=("input", "cat", "linear", "addmm"),
    index=(5, 2),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "where_on_detached", "drop_invalid_sample", "reject_input", "fix_upstream"),
    variable=("next_observations", "data.next_observations", "next_obs", None),
    line=("next_state_actions = (s.target_actor(data.next_observations) + clipped_noise).clamp(-1.0, 1.0)", "x = F.relu(self.fc1(x))"),
)


class QNetwork(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim + act_dim, 32)
        self.fc2 = nn.Linear(32, 1)

    def forward(self, x, a):
        x = torch.cat([x, a], 1)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


class Actor(nn.Module):
    def __init__(self, obs_dim=6, act_dim=2):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 32)
        self.fc_mu = nn.Linear(32, act_dim)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        return torch.tanh(self.fc_mu(x))


def sample_batch(n=12):
    next_observations = torch.randn(n, 6)
    dones = torch.zeros(n, 1)
    dones[[1, 5]] = 1.0
    next_observations[5, 2:5] = float("nan")  # joint velocities after the solver blew up
    return SimpleNamespace(
        observations=torch.randn(n, 6),
        actions=torch.rand(n, 2) * 2 - 1,
        rewards=torch.randn(n, 1),
        next_observations=next_observations,
        dones=dones,
    )


def build():
    torch.manual_seed(20)
    actor, qf1, qf2 = Actor(), QNetwork(), QNetwork()
    target_actor, qf1_target, qf2_target = Actor(), QNetwork(), QNetwork()
    target_actor.load_state_dict(actor.state_dict())
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    model = nn.ModuleList([qf1, qf2])
    return SimpleNamespace(
        model=model,
        actor=actor,
        target_actor=target_actor,
        qf1=qf1,
        qf2=qf2,
        qf1_target=qf1_target,
        qf2_target=qf2_target,
        data=sample_batch(),
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    data = s.data
    with torch.no_grad():
        clipped_noise = (torch.randn_like(data.actions) * 0.2).clamp(-0.5, 0.5)
        next_state_actions = (s.target_actor(data.next_observations) + clipped_noise).clamp(-1.0, 1.0)
        qf1_next_target = s.qf1_target(data.next_observations, next_state_actions)
        qf2_next_target = s.qf2_target(data.next_observations, next_state_actions)
        min_qf_next_target = torch.min(qf1_next_target, qf2_next_target)
        next_q_value = data.rewards.flatten() + (1 - data.dones.flatten()) * 0.99 * min_qf_next_target.view(-1)
    qf1_loss = F.mse_loss(s.qf1(data.observations, data.actions).view(-1), next_q_value)
    qf2_loss = F.mse_loss(s.qf2(data.observations, data.actions).view(-1), next_q_value)
    qf_loss = qf1_loss + qf2_loss
    s.optimizer.zero_grad()
    qf_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return qf_loss


if __name__ == "__main__":
    run()

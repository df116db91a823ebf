"""RLlib #7923: the environment integrates the agent's unbounded actions without checking, and now and then a state is +-inf. The
default fully connected net is tanh: an infinite pre-activation becomes +-1, so actions, value and loss are finite, and only the
gradient of the first layer, (1 - tanh^2) * inf = 0 * inf, is NaN. From the next step on every action is NaN.

    https://github.com/ray-project/ray/issues/7923

Heals: rejecting or dropping the transition, clipping observations on the way in (MeanStdFilter's clip), bounds in the environment.
Does not heal: grad_clip (the norm is NaN and spreads), nan_to_num on the loss (it is finite).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any",),
    index=(5, 2),
    masked=None,
    role=("hidden",),
    fix=("reject_input", "drop_invalid_sample", "clamp_input", "fix_upstream"),
    variable=("obs", "new_obs"),
    line=(
        'mean, log_std, value = s.model(batch["obs"])',
        "h = self.hidden(obs)",
        "return torch.tensor(states)",
        "mean, log_std, value = model(obs)",
        None,
    ),
)


class FullyConnectedNetwork(nn.Module):
    def __init__(self, obs_dim, act_dim, hidden=16):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.logits = nn.Linear(hidden, 2 * act_dim)
        self.value_branch = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.hidden(obs)
        mean, log_std = self.logits(h).chunk(2, dim=-1)
        return mean, log_std, self.value_branch(h).squeeze(-1)


def rollout():
    states = []
    for t in range(8):
        x, v = 0.2 * t, 0.5 - 0.1 * t
        if t == 5:  # the integrator has diverged in this step
            states.append([x, v, float("inf"), 0.1])
        else:
            states.append([x, v, 0.3 * v, 0.1])
    return torch.tensor(states)


def build():
    torch.manual_seed(33)
    model = FullyConnectedNetwork(4, 2)
    obs = rollout()
    with torch.no_grad():
        mean, log_std, value = model(obs)
        dist = Normal(mean, log_std.exp())
        actions = dist.sample()
        logp = dist.log_prob(actions).sum(-1)
    batch = {
        "obs": obs,
        "actions": actions,
        "action_logp": logp,
        "vf_preds": value,
        "advantages": torch.randn(8),
        "value_targets": torch.randn(8),
    }
    return SimpleNamespace(model=model, batch=batch, optimizer=torch.optim.Adam(model.parameters(), lr=5e-5))


def run(s=None):
    s = s or build()
    batch = s.batch
    mean, log_std, value = s.model(batch["obs"])
    dist = Normal(mean, log_std.exp())
    logp = dist.log_prob(batch["actions"]).sum(-1)
    logp_ratio = torch.exp(logp - batch["action_logp"])
    adv = batch["advantages"]
    surrogate = torch.min(adv * logp_ratio, adv * logp_ratio.clamp(0.7, 1.3))
    vf_loss = (value - batch["value_targets"]).pow(2).clamp(0, 10.0)
    entropy = dist.entropy().sum(-1)
    loss = (-surrogate + 1.0 * vf_loss - 0.01 * entropy).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

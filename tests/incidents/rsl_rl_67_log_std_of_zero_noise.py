"""rsl_rl's log parametrisation of the action noise initialises log_std with log(init_noise_std). The gripper joint is meant to be
deterministic and is given a noise of 0: its log_std is -inf from the first moment, the std is 0 and the Gaussian log-probability of the
sampled action (equal to the mean) is 0 / 0.

Source: https://github.com/leggedrobotics/rsl_rl/pull/67 (noise_std_type="log": log_std = log(init_noise_std * ones)).
Heals: refuse or floor a noise of 0 before the logarithm. Flooring the std in update_distribution gives a finite loss, and a parameter that
stays -inf for ever; nan_to_num on the log-probability leaves the gradient NaN.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights", "log_zero", "zero_denominator", "zero_div_zero"),
    op=("any", "log", "exp"),
    index=(3,),
    masked=None,
    role=("weights",),
    fix=("validate_config", "fix_upstream", "clamp_input", "representable_eps"),
    variable=("log_std",),
    line=(
        "std = torch.exp(self.log_std).expand_as(mean)",
        "self.log_std = nn.Parameter(torch.log(init_noise_std * torch.ones(num_actions)))",
    ),
)


class ActorCritic(nn.Module):
    def __init__(self, num_obs, num_actions, init_noise_std, hidden=32):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(num_obs, hidden), nn.ELU(), nn.Linear(hidden, num_actions))
        self.critic = nn.Sequential(nn.Linear(num_obs, hidden), nn.ELU(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.log(init_noise_std * torch.ones(num_actions)))
        self.distribution = None
        Normal.set_default_validate_args(False)

    def update_distribution(self, obs):
        mean = self.actor(obs)
        std = torch.exp(self.log_std).expand_as(mean)
        self.distribution = Normal(mean, std)

    def act(self, obs):
        self.update_distribution(obs)
        return self.distribution.sample()

    def get_actions_log_prob(self, actions):
        return self.distribution.log_prob(actions).sum(dim=-1)

    def evaluate(self, obs):
        return self.critic(obs).squeeze(-1)


class RolloutStorage:
    def __init__(self, policy, obs):
        with torch.no_grad():
            self.obs = obs
            self.actions = policy.act(obs)
            self.values = policy.evaluate(obs)
            self.old_actions_log_prob = torch.full((obs.shape[0],), -1.5)
            self.returns = self.values + torch.randn(obs.shape[0])
            advantages = self.returns - self.values
            self.advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def build():
    torch.manual_seed(67)
    cfg = {"num_obs": 8, "num_actions": 4, "init_noise_std": torch.tensor([0.8, 0.8, 0.5, 0.0])}  # the gripper does not explore
    policy = ActorCritic(**cfg)
    storage = RolloutStorage(policy, torch.randn(24, 8))
    return SimpleNamespace(
        model=policy, storage=storage, clip_param=0.2, value_loss_coef=1.0, optimizer=torch.optim.Adam(policy.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    batch = s.storage
    s.model.update_distribution(batch.obs)
    actions_log_prob = s.model.get_actions_log_prob(batch.actions)
    ratio = torch.exp(actions_log_prob - batch.old_actions_log_prob)
    surrogate = -batch.advantages * ratio
    surrogate_clipped = -batch.advantages * ratio.clamp(1.0 - s.clip_param, 1.0 + s.clip_param)
    surrogate_loss = torch.max(surrogate, surrogate_clipped).mean()
    value_loss = (batch.returns - s.model.evaluate(batch.obs)).pow(2).mean()
    loss = surrogate_loss + s.value_loss_coef * value_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

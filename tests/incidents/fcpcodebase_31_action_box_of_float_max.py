"""m-abr/FCPCodebase #31 (and stable-baselines3 #897): after a switch from PPO to SAC/TD3 every action is NaN or inf. The environment declares one
joint as Box(-finfo.max, finfo.max); the off-policy policy rescales its tanh output with `high - low`, which overflows to inf although both
bounds are finite, and the critic makes NaN of the infinite action.

https://github.com/m-abr/FCPCodebase/issues/31
A reasonable finite bound of the action space heals it (the maintainer's answer). Clamping the rescaled action into the box, or the rescaling as
a mean of both ends, keeps an action of 1e38 and the critic still overflows.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow",),
    op=("sub",),
    index=(2,),
    masked=None,
    role=("hidden", "logits"),
    fix=("validate_config", "clamp_input", "fix_upstream"),
    variable=(None,),
    line=("return self.low + (0.5 * (scaled_action + 1.0) * (self.high - self.low))",),
)

MAX = torch.finfo(torch.float32).max


class Actor(nn.Module):
    def __init__(self, obs_dim, low, high, hidden=16):
        super().__init__()
        self.latent_pi = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, low.numel())
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def unscale_action(self, scaled_action):
        return self.low + (0.5 * (scaled_action + 1.0) * (self.high - self.low))

    def forward(self, obs):
        return self.unscale_action(torch.tanh(self.mu(self.latent_pi(obs))))


class ContinuousCritic(nn.Module):
    def __init__(self, obs_dim, act_dim, hidden=16):
        super().__init__()
        self.qf0 = nn.Sequential(nn.Linear(obs_dim + act_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, obs, actions):
        return self.qf0(torch.cat([obs, actions], dim=1)).squeeze(-1)


def build():
    torch.manual_seed(31)
    obs_dim = 5
    low = torch.tensor([-1.0, -1.0, -MAX])  # two joints, and the kick power, left without a limit
    high = torch.tensor([1.0, 1.0, MAX])
    actor = Actor(obs_dim, low, high)
    actor_target = Actor(obs_dim, low, high)
    actor_target.load_state_dict(actor.state_dict())
    critic = ContinuousCritic(obs_dim, 3)
    critic_target = ContinuousCritic(obs_dim, 3)
    critic_target.load_state_dict(critic.state_dict())
    replay = SimpleNamespace(
        observations=torch.randn(8, obs_dim),
        actions=torch.rand(8, 3) * 2.0 - 1.0,
        rewards=torch.randn(8),
        next_observations=torch.randn(8, obs_dim),
        dones=torch.zeros(8),
    )
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    return SimpleNamespace(
        model=model,
        actor=actor,
        actor_target=actor_target,
        critic=critic,
        critic_target=critic_target,
        replay=replay,
        gamma=0.98,
        actor_optimizer=torch.optim.Adam(actor.parameters(), lr=1e-3),
        optimizer=torch.optim.Adam(critic.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    data = s.replay
    with torch.no_grad():
        next_actions = s.actor_target(data.next_observations)
        next_q_values = s.critic_target(data.next_observations, next_actions)
        target_q_values = data.rewards + (1 - data.dones) * s.gamma * next_q_values
    critic_loss = F.mse_loss(s.critic(data.observations, data.actions), target_q_values)
    s.optimizer.zero_grad()
    critic_loss.backward()
    s.optimizer.step()

    actor_loss = -s.critic(data.observations, s.actor(data.observations)).mean()
    s.actor_optimizer.zero_grad()
    actor_loss.backward()
    s.actor_optimizer.step()
    return critic_loss


if __name__ == "__main__":
    print(run())

"""CAPS (conditioning for action policy smoothness), as added to many PPO/DDPG trainers: L_T is the Euclidean distance between the
actions for s_t and s_{t+1}. While the robot stands still both observations are the same, the distance is exactly 0, and the
gradient of the square root there is infinite: inf * 0 = NaN in every weight of the actor. The loss itself is finite.

    paper and code of the regulariser: https://arxiv.org/abs/2012.06644 , http://ai.bu.edu/caps/

Heals: a small constant under the root, the squared distance, torch.linalg.vector_norm (subgradient 0), leaving out idle pairs.
Does not heal: torch.where(distance > 0, distance, 0) after the root, clipping of gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(3,),
    masked=None,
    role=("loss", "hidden", "grad"),
    fix=(
        "clamp_input",
        "avoid_singular_op",
        "clamp_denominator",
        "representable_eps",
        "stable_function",
        "mask_before_op",
        "drop_invalid_sample",
    ),
    variable=("distance", "temporal", None),
    line=("distance = (a - b).pow(2).sum(-1).sqrt()",),
)


class Actor(nn.Module):
    def __init__(self, obs_dim=6, act_dim=4, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, act_dim), nn.Tanh())

    def forward(self, obs):
        return self.net(obs)


class Critic(nn.Module):
    def __init__(self, obs_dim=6, act_dim=4, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim + act_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, obs, act):
        return self.net(torch.cat([obs, act], dim=-1)).squeeze(-1)


def action_distance(a, b):
    distance = (a - b).pow(2).sum(-1).sqrt()
    return distance


def caps_loss(actor, obs, next_obs, lambda_t=0.5, lambda_s=0.5, sigma=0.05):
    actions = actor(obs)
    temporal = action_distance(actions, actor(next_obs))
    nearby = obs + sigma * torch.randn_like(obs)
    spatial = action_distance(actions, actor(nearby))
    return actions, lambda_t * temporal.mean() + lambda_s * spatial.mean()


def build():
    torch.manual_seed(6)
    model = Actor()
    critic = Critic()
    for p in critic.parameters():
        p.requires_grad_(False)
    obs = torch.randn(8, 6)
    next_obs = obs + 0.1 * torch.randn(8, 6)
    next_obs[3] = obs[3]  # waiting for a command
    return SimpleNamespace(model=model, critic=critic, obs=obs, next_obs=next_obs, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    torch.manual_seed(7)
    actions, regularizer = caps_loss(s.model, s.obs, s.next_obs)
    loss = -s.critic(s.obs, actions).mean() + regularizer
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

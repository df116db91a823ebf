"""BC-regularized-GAIL #3/#4 - the GAIL reward -log(1 - D) of a discriminator that is sure.

The imitation reward is computed under no_grad with `s = sigmoid(d)` and `-(1 - s).log()`. On one state the discriminator's logit is above
17, the sigmoid is exactly 1 in float32 and the reward is +inf. The returns of all earlier steps of that environment are inf, the advantage
normalisation turns them into NaN for every sample, and the PPO step ruins the policy.
Source: https://github.com/rohitrango/BC-regularized-GAIL/issues/4 (and #3), a2c_ppo_acktr/algo/gail.py `predict_reward`.
Heals: softplus(d) in place of -log(1 - sigmoid(d)), or bounding d before the sigmoid. Does not: clamping s to 1 - 1e-8, which is 1.0 in
float32, or a larger eps in the normalisation.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(3, 0),
    masked=False,
    role=("rewards",),
    fix=("stable_function", "clamp_input"),
    variable=(None,),
    line=("reward = -(1 - s).log()",),
)


class Discriminator(nn.Module):
    def __init__(self, input_dim, hidden_dim=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(input_dim, hidden_dim), nn.Tanh(), nn.Linear(hidden_dim, 1))

    def predict_reward(self, state, action):
        with torch.no_grad():
            self.eval()
            d = self.trunk(torch.cat([state, action], dim=1))
            s = torch.sigmoid(d)
            reward = -(1 - s).log()
            return reward


def compute_returns(rewards, masks, next_value, gamma):
    returns = torch.zeros(rewards.size(0) + 1, rewards.size(1))
    returns[-1] = next_value
    for step in reversed(range(rewards.size(0))):
        returns[step] = returns[step + 1] * gamma * masks[step] + rewards[step]
    return returns[:-1]


def build():
    torch.manual_seed(2104)
    discriminator = Discriminator(6)
    with torch.no_grad():  # it has overfitted the expert data
        discriminator.trunk[0].weight.mul_(3.0)
        discriminator.trunk[2].weight.mul_(75.0)
    actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    states, actions = torch.randn(8, 4), torch.randn(8, 2)
    masks = torch.ones(4, 2)
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, eps=1e-5)
    return SimpleNamespace(
        model=actor,
        discriminator=discriminator,
        optimizer=optimizer,
        states=states,
        actions=actions,
        masks=masks,
        values=torch.zeros(4, 2),
        gamma=0.99,
        clip_param=0.2,
    )


def run(s=None):
    s = s or build()
    rewards = s.discriminator.predict_reward(s.states, s.actions).view(4, 2)
    returns = compute_returns(rewards, s.masks, torch.zeros(2), s.gamma)
    advantages = (returns - s.values).view(-1, 1)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
    dist = torch.distributions.Normal(s.model(s.states), 1.0)
    action_log_probs = dist.log_prob(s.actions).sum(-1, keepdim=True)
    ratio = torch.exp(action_log_probs - action_log_probs.detach())
    surr1 = ratio * advantages
    surr2 = torch.clamp(ratio, 1.0 - s.clip_param, 1.0 + s.clip_param) * advantages
    action_loss = -torch.min(surr1, surr2).mean()
    s.optimizer.zero_grad()
    action_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return action_loss

"""skrl's AMP: the style reward is -log(max(1 - 1 / (1 + exp(-logit)), 1e-4)). The discriminator is sure of one motion, logit -120, and
exp(120) is inf in fp32. 1 / inf is 0, the reward is -log(1) = 0, which is right, and all of it is under no_grad. The opposite end, logit
+120, meets the floor of 1e-4. Nothing is harmed.

https://github.com/Toni-SM/skrl/blob/main/skrl/agents/torch/amp/amp.py (AMP, "compute style reward")
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class GaussianPolicy(nn.Module):
    def __init__(self, obs_dim=6, actions=2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, 16), nn.ELU(), nn.Linear(16, actions))
        self.log_std_parameter = nn.Parameter(torch.full((actions,), -0.5))

    def log_prob(self, states, actions):
        distribution = torch.distributions.Normal(self.net(states), self.log_std_parameter.exp())
        return distribution.log_prob(actions).sum(-1, keepdim=True)


def compute_style_reward(discriminator, amp_states, scale=2.0):
    with torch.no_grad():
        amp_logits = discriminator(amp_states)
        style_reward = -torch.log(torch.maximum(1 - 1 / (1 + torch.exp(-amp_logits)), torch.tensor(0.0001)))
        style_reward *= scale
    return style_reward


def compute_gae(rewards, dones, values, next_values, discount_factor=0.99, lambda_coefficient=0.95):
    advantage, advantages = 0, torch.zeros_like(rewards)
    not_dones = dones.logical_not()
    for i in reversed(range(rewards.shape[0])):
        advantage = rewards[i] - values[i] + discount_factor * (next_values[i] + lambda_coefficient * not_dones[i] * advantage)
        advantages[i] = advantage
    returns = advantages + values
    return returns, (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def build():
    torch.manual_seed(2212)
    policy, value, discriminator = GaussianPolicy(), nn.Linear(6, 1), nn.Linear(4, 1)
    model = nn.ModuleDict(dict(policy=policy, value=value, discriminator=discriminator))
    states, amp_states, motion = torch.randn(8, 6), torch.randn(8, 4), torch.randn(8, 4)
    with torch.no_grad():
        discriminator.weight.copy_(torch.tensor([[3.0, 0.2, -0.1, 0.4]]))
        amp_states[2, 0], amp_states[5, 0] = -40.0, 40.0  # a fall, and a perfect copy of the motion
        actions = policy.net(states) + 0.6 * torch.randn(8, 2)
        log_prob = policy.log_prob(states, actions)
        values = value(states)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        states=states,
        amp_states=amp_states,
        motion=motion,
        actions=actions,
        log_prob=log_prob,
        values=values,
        rewards=torch.rand(8, 1),
        dones=torch.zeros(8, 1).bool(),
    )


def run(s=None):
    s = s or build()
    style_reward = compute_style_reward(s.model["discriminator"], s.amp_states)
    combined_rewards = 0.5 * s.rewards + 0.5 * style_reward
    next_values = torch.cat([s.values[1:], torch.zeros(1, 1)])
    returns, advantages = compute_gae(combined_rewards, s.dones, s.values, next_values)
    ratio = torch.exp(s.model["policy"].log_prob(s.states, s.actions) - s.log_prob)
    policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
    value_loss = 2.5 * F.mse_loss(s.model["value"](s.states), returns)
    fake, real = s.model["discriminator"](s.amp_states), s.model["discriminator"](s.motion)
    discriminator_loss = 0.5 * (
        F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake)) + F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
    )
    loss = policy_loss + value_loss + discriminator_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

"""An environment reward of 1e20 is finite, but the squared value error of that step overflows float32 and the value loss is infinite.
https://github.com/DLR-RM/stable-baselines3/pull/1942
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow",),
    op=("mse_loss",),
    index=(5,),
    masked=False,
    role=("loss",),
    fix=("clamp_input", "reject_input", "drop_invalid_sample"),
    variable=("value_loss",),
    line=('value_loss = F.mse_loss(d.returns, values, reduction="none")',),
)


class ActorCriticPolicy(nn.Module):
    def __init__(self, obs=4, actions=3):
        super().__init__()
        self.mlp_extractor = nn.Sequential(nn.Linear(obs, 16), nn.Tanh())
        self.action_net = nn.Linear(16, actions)
        self.value_net = nn.Linear(16, 1)

    def evaluate_actions(self, obs, actions):
        latent = self.mlp_extractor(obs)
        dist = torch.distributions.Categorical(logits=self.action_net(latent), validate_args=False)
        return self.value_net(latent).flatten(), dist.log_prob(actions), dist.entropy()


def compute_returns(rewards, gamma=0.99):
    returns = torch.zeros_like(rewards)
    running = torch.zeros(())
    for step in reversed(range(len(rewards))):
        running = rewards[step] + (gamma * running if step != 5 else 0.0)
        returns[step] = running
    return returns


def build():
    torch.manual_seed(1942)
    policy = ActorCriticPolicy()
    rewards = torch.rand(10)
    rewards[5] = 1.0e20  # unit mix-up in one reward term
    returns = compute_returns(rewards)
    returns[:5] = compute_returns(rewards[:5])  # the episode ended at step 4
    obs, actions = torch.randn(10, 4), torch.randint(0, 3, (10,))
    batch = SimpleNamespace(observations=obs, actions=actions, returns=returns, advantages=torch.randn(10))
    with torch.no_grad():
        batch.old_log_prob = policy.evaluate_actions(obs, actions)[1]
    return SimpleNamespace(model=policy, optimizer=torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5), batch=batch)


def run(s=None):
    s = s or build()
    d = s.batch
    values, log_prob, entropy = s.model.evaluate_actions(d.observations, d.actions)
    ratio = torch.exp(log_prob - d.old_log_prob)
    policy_loss = -torch.min(d.advantages * ratio, d.advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
    value_loss = F.mse_loss(d.returns, values, reduction="none")
    loss = policy_loss + 0.5 * value_loss.mean() - 0.01 * entropy.mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss

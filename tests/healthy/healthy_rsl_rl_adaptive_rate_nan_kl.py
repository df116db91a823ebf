"""rsl_rl PPO - the KL that steers the learning rate is NaN on one mini-batch, and nothing is harmed.

Recurrent mini-batches are padded; the padded slots of the stored distribution are 0 (sigma = 0), so the KL under inference mode is
log(sigma / 0) + ... = inf and, where the mean is padded with NaN, NaN. Every comparison with NaN is false: the rate stays as it was. The losses
only read the valid slots. Healthy.
Source: https://github.com/leggedrobotics/rsl_rl/blob/main/rsl_rl/algorithms/ppo.py (schedule "adaptive")
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

OBS, ACT, STEPS, ENVS = 6, 3, 4, 3


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(OBS, 16), nn.ELU(), nn.Linear(16, ACT))
        self.critic = nn.Sequential(nn.Linear(OBS, 16), nn.ELU(), nn.Linear(16, 1))
        self.std = nn.Parameter(torch.ones(ACT))

    def forward(self, obs):
        return torch.distributions.Normal(self.actor(obs), self.std), self.critic(obs).squeeze(-1)


def build():
    torch.manual_seed(9)
    model = ActorCritic()
    masks = torch.ones(STEPS, ENVS, dtype=torch.bool)
    masks[2:, 1] = False
    obs = torch.randn(STEPS, ENVS, OBS)
    with torch.no_grad():
        dist, values = model(obs)
        actions = dist.sample()
        old_log_prob = dist.log_prob(actions).sum(-1) + 0.02 * torch.randn(STEPS, ENVS)
    old_mu, old_sigma = dist.mean.clone(), dist.stddev.clone()
    old_mu[~masks], old_sigma[~masks] = float("nan"), 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        obs=obs,
        masks=masks,
        actions=actions,
        old_log_prob=old_log_prob,
        old_mu=old_mu,
        old_sigma=old_sigma,
        advantages=torch.randn(STEPS, ENVS),
        returns=values + torch.randn(STEPS, ENVS),
        learning_rate=1e-3,
        desired_kl=0.01,
    )


def run(s=None):
    s = s or build()
    dist, values = s.model(s.obs)
    with torch.inference_mode():
        mu, sigma = dist.mean, dist.stddev
        kl = torch.sum(
            torch.log(sigma / s.old_sigma + 1e-5) + (s.old_sigma.square() + (s.old_mu - mu).square()) / (2.0 * sigma.square()) - 0.5, dim=-1
        )
        kl_mean = kl.mean()
        if kl_mean > s.desired_kl * 2.0:
            s.learning_rate = max(1e-5, s.learning_rate / 1.5)
        elif kl_mean < s.desired_kl / 2.0 and kl_mean > 0.0:
            s.learning_rate = min(1e-2, s.learning_rate * 1.5)
        for group in s.optimizer.param_groups:
            group["lr"] = s.learning_rate
    m = s.masks
    log_prob = dist.log_prob(s.actions).sum(-1)[m]
    ratio = torch.exp(log_prob - s.old_log_prob[m])
    advantages = s.advantages[m]
    surrogate_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
    value_loss = (s.returns[m] - values[m]).pow(2).mean()
    loss = surrogate_loss + value_loss - 0.005 * dist.entropy().sum(-1)[m].mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""HumanCompatibleAI/imitation #444 - AIRL with a SAC generator: NaN log-probabilities of expert actions are replaced by a cutoff.

Expert actions were rescaled and lie on the bound of the action space or a rounding error beyond it, so the inverse tanh is inf or NaN and so is
the squashed Gaussian's log-probability. It is computed without gradient, NaN entries are overwritten by LOG_PROB_CUTOFF and the rest is floored
at it before the discriminator's logits are formed. Loss, gradients and weights are finite and right.
Source: https://github.com/HumanCompatibleAI/imitation/pull/444 (review of adversarial/common.py)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

LOG_PROB_CUTOFF = -50.0


class GeneratorActor(nn.Module):
    def __init__(self, obs_dim=5, act_dim=2):
        super().__init__()
        self.latent_pi = nn.Sequential(nn.Linear(obs_dim, 24), nn.ReLU())
        self.mu = nn.Linear(24, act_dim)
        self.log_std = nn.Linear(24, act_dim)

    def log_prob(self, obs, actions):
        h = self.latent_pi(obs)
        dist = Normal(self.mu(h), self.log_std(h).clamp(-5.0, 2.0).exp(), validate_args=False)
        gaussian_actions = torch.atanh(actions)
        log_prob = dist.log_prob(gaussian_actions).sum(-1)
        return log_prob - torch.log(1.0 - actions.pow(2) + 1e-6).sum(-1)


class ShapedRewardNet(nn.Module):
    def __init__(self, obs_dim=5, act_dim=2, gamma=0.99):
        super().__init__()
        self.gamma = gamma
        self.base = nn.Sequential(nn.Linear(obs_dim + act_dim, 24), nn.ReLU(), nn.Linear(24, 1))
        self.potential = nn.Sequential(nn.Linear(obs_dim, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, obs, acts, next_obs, dones):
        shaping = self.gamma * (1.0 - dones) * self.potential(next_obs).squeeze(-1) - self.potential(obs).squeeze(-1)
        return self.base(torch.cat([obs, acts], -1)).squeeze(-1) + shaping


def log_policy_act_prob(actor, obs, acts):
    with torch.no_grad():
        log_probs = actor.log_prob(obs, acts)
        log_probs[torch.isnan(log_probs)] = LOG_PROB_CUTOFF
        return log_probs.clamp(min=LOG_PROB_CUTOFF)


def build():
    torch.manual_seed(444)
    actor, model = GeneratorActor(), ShapedRewardNet()
    n = 8
    expert_acts = torch.tanh(torch.randn(n, 2))
    expert_acts[2, 0] = 1.0
    expert_acts[6, 1] = -1.0000001
    gen_acts = torch.tanh(torch.randn(n, 2))
    batch = SimpleNamespace(
        obs=torch.randn(2 * n, 5),
        next_obs=torch.randn(2 * n, 5),
        acts=torch.cat([expert_acts, gen_acts]),
        dones=torch.zeros(2 * n),
        labels_expert_is_one=torch.cat([torch.ones(n), torch.zeros(n)]),
    )
    return SimpleNamespace(model=model, actor=actor, batch=batch, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    b = s.batch
    log_probs = log_policy_act_prob(s.actor, b.obs, b.acts)
    disc_logits = s.model(b.obs, b.acts, b.next_obs, b.dones) - log_probs
    loss = F.binary_cross_entropy_with_logits(disc_logits, b.labels_expert_is_one)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

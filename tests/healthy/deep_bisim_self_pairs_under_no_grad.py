"""Looks broken, is healthy. The bisimulation loss pairs every sample with a permuted one; some are paired with themselves, so the
Wasserstein distance is sqrt(0) exactly, whose derivative is infinite. The distance is a target: the transition model is evaluated under
no_grad, nothing is differentiated through the root, and the latent distance is a smooth L1.

Source: update_encoder of https://github.com/facebookresearch/deep_bisim4control/blob/main/agent/bisim_agent.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class ProbabilisticTransitionModel(nn.Module):
    def __init__(self, feature_dim, action_dim, hidden=32, max_sigma=1e1, min_sigma=1e-4):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(feature_dim + action_dim, hidden), nn.LayerNorm(hidden), nn.ReLU())
        self.fc_mu, self.fc_sigma = nn.Linear(hidden, feature_dim), nn.Linear(hidden, feature_dim)
        self.max_sigma, self.min_sigma = max_sigma, min_sigma

    def forward(self, x):
        x = self.fc(x)
        sigma = torch.sigmoid(self.fc_sigma(x))
        return self.fc_mu(x), self.min_sigma + (self.max_sigma - self.min_sigma) * sigma


class BisimAgent(nn.Module):
    def __init__(self, obs_dim=9, action_dim=2, feature_dim=8, discount=0.99):
        super().__init__()
        self.discount = discount
        self.encoder = nn.Sequential(nn.Linear(obs_dim, 32), nn.ReLU(), nn.Linear(32, feature_dim), nn.LayerNorm(feature_dim))
        self.transition_model = ProbabilisticTransitionModel(feature_dim, action_dim)
        self.reward_decoder = nn.Linear(feature_dim, 1)

    def encoder_loss(self, obs, action, reward):
        h = self.encoder(obs)
        perm = torch.randperm(obs.shape[0])
        h2 = h[perm]
        with torch.no_grad():
            mu1, sigma1 = self.transition_model(torch.cat([h, action], dim=1))
            reward2, mu2, sigma2 = reward[perm], mu1[perm], sigma1[perm]
        z_dist = F.smooth_l1_loss(h, h2, reduction="none")
        r_dist = F.smooth_l1_loss(reward, reward2, reduction="none")
        transition_dist = torch.sqrt((mu1 - mu2).pow(2) + (sigma1 - sigma2).pow(2))
        bisimilarity = r_dist + self.discount * transition_dist
        return (z_dist - bisimilarity).pow(2).mean()

    def transition_reward_loss(self, obs, action, next_obs, reward):
        h = self.encoder(obs)
        mu, sigma = self.transition_model(torch.cat([h, action], dim=1))
        with torch.no_grad():
            next_h = self.encoder(next_obs)
        diff = (mu - next_h) / sigma
        loss = torch.mean(0.5 * diff.pow(2) + torch.log(sigma))
        return loss + F.mse_loss(self.reward_decoder(mu + sigma * torch.randn_like(sigma)), reward)


def build():
    torch.manual_seed(2006)
    agent = BisimAgent()
    obs, action = torch.randn(12, 9), torch.rand(12, 2) * 2 - 1
    obs[7] = obs[2]
    action[7] = action[2]  # the same transition was sampled twice from the replay buffer
    return SimpleNamespace(
        model=agent,
        obs=obs,
        action=action,
        next_obs=obs + 0.1 * torch.randn(12, 9),
        reward=torch.randn(12, 1),
        bisim_coef=0.5,
        optimizer=torch.optim.Adam(agent.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    for _ in range(3):
        encoder_loss = s.model.encoder_loss(s.obs, s.action, s.reward)
        model_loss = s.model.transition_reward_loss(s.obs, s.action, s.next_obs, s.reward)
        loss = s.bisim_coef * encoder_loss + model_loss
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

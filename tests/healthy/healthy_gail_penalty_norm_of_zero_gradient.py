"""GAIL's gradient penalty - the input gradient of the discriminator is exactly 0 for two mixed samples, and its norm is differentiated there.

The ReLU units are all off for an absorbing state, so the gradient is a row of zeros; (norm(2) - 1)^2 looks like a square root at 0, but
torch's norm takes the subgradient 0. The penalty of those rows is the constant 1 and the second backward is finite. Healthy.
Source: https://github.com/ikostrikov/pytorch-a2c-ppo-acktr-gail/blob/master/a2c_ppo_acktr/algo/gail.py (compute_grad_pen)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import autograd

STATE, ACTION, BATCH = 5, 2, 6


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATE + ACTION, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, state, action):
        return self.trunk(torch.cat([state, action], dim=1))

    def compute_grad_pen(self, expert, policy, lambda_=10):
        alpha = torch.rand(expert.size(0), 1).expand_as(expert)
        mixup_data = (alpha * expert + (1 - alpha) * policy).requires_grad_(True)
        disc = self.trunk(mixup_data)
        grad = autograd.grad(
            outputs=disc, inputs=mixup_data, grad_outputs=torch.ones_like(disc), create_graph=True, retain_graph=True, only_inputs=True
        )[0]
        return lambda_ * (grad.norm(2, dim=1) - 1).pow(2).mean()


def build():
    torch.manual_seed(5)
    discriminator = Discriminator()
    with torch.no_grad():
        discriminator.trunk[0].bias.fill_(-0.05)  # a vector of zeros switches every unit off
    expert = torch.randn(BATCH, STATE + ACTION)
    policy = torch.randn(BATCH, STATE + ACTION)
    expert[[1, 4]] = 0.0  # both reached the absorbing state
    policy[[1, 4]] = 0.0
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    return SimpleNamespace(model=discriminator, optimizer=optimizer, expert=expert, policy=policy)


def run(s=None):
    s = s or build()
    policy_d = s.model(s.policy[:, :STATE], s.policy[:, STATE:])
    expert_d = s.model(s.expert[:, :STATE], s.expert[:, STATE:])
    expert_loss = F.binary_cross_entropy_with_logits(expert_d, torch.ones_like(expert_d))
    policy_loss = F.binary_cross_entropy_with_logits(policy_d, torch.zeros_like(policy_d))
    grad_pen = s.model.compute_grad_pen(s.expert, s.policy)
    loss = expert_loss + policy_loss + grad_pen
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

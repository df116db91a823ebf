"""TD-MPC2 - log-probability of squashed actions that are exactly 1.0 (looks broken, is healthy).

tanh saturates, 1 - pi^2 is 0 and on another row rounds a hair below 0; relu and the 1e-6 inside the logarithm hold value and gradient (relu's
derivative at 0 is 0). The pre-tanh value and the exact log-det that are logged under no_grad are inf and -inf and go nowhere.
Source: https://github.com/nicklashansen/tdmpc2 tdmpc2/common/math.py (squash), tdmpc2/tdmpc2.py (update_pi)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class WorldModelHeads(nn.Module):
    def __init__(self, latent_dim=8, action_dim=2):
        super().__init__()
        self.pi = nn.Linear(latent_dim, 2 * action_dim)
        self.q = nn.Sequential(nn.Linear(latent_dim + action_dim, 16), nn.Mish(), nn.Linear(16, 1))


def log_std_of(x, low=-10.0, dif=12.0):
    return low + 0.5 * dif * (torch.tanh(x) + 1)


def gaussian_logprob(eps, log_std):
    residual = -0.5 * eps.pow(2) - log_std
    return (residual - 0.9189385175704956).sum(-1, keepdim=True)


def squash(pi, log_pi):
    pi = torch.tanh(pi)
    squashed_pi = torch.log(F.relu(1 - pi.pow(2)) + 1e-6)
    return pi, log_pi - squashed_pi.sum(-1, keepdim=True)


def build():
    torch.manual_seed(21)
    model = WorldModelHeads()
    for p in model.q.parameters():
        p.requires_grad_(False)
    z = torch.randn(5, 8).softmax(-1)
    with torch.no_grad():
        model.pi.bias[:2] = torch.tensor([0.1, 22.0])  # the gripper channel pushes as hard as it can
    return SimpleNamespace(model=model, z=z, eps=torch.randn(5, 2), optimizer=torch.optim.Adam(model.pi.parameters(), lr=3e-4, eps=1e-5))


def run(s=None, entropy_coef=1e-4):
    s = s or build()
    mu, log_std = s.model.pi(s.z).chunk(2, dim=-1)
    log_std = log_std_of(log_std)
    raw = mu + s.eps * log_std.exp()
    pi, log_pi = squash(raw, gaussian_logprob(s.eps, log_std))
    with torch.no_grad():
        s.metrics = dict(pre_tanh=torch.atanh(pi).abs().max().item(), exact_log_det=torch.log(1 - pi.pow(2)).sum(-1).mean().item())
    q = s.model.q(torch.cat([s.z, pi], dim=-1))
    loss = (entropy_coef * log_pi - q).mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.pi.parameters(), 20.0)
    s.optimizer.step()
    return loss

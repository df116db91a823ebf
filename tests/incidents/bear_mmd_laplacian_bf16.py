"""BEAR keeps the policy near the data with the square root of a kernel MMD: k(x,x) + k(y,y) - 2 k(x,y) + 1e-6 under a sqrt.

Policy and behaviour model were moved to bfloat16. Once the two sets of actions agree, the three kernel means are nearly the same number
near 1, and bfloat16 keeps only eight bits of each: the difference that should be a tiny positive number comes out as -0.0078 for one
state. The sqrt of it is NaN.

Source: https://github.com/aviralkumar2907/BEAR/blob/master/algos.py (mmd_loss_laplacian)
Heals: the kernel means in float32; a clamp under the sqrt. Does not: a hundred times larger epsilon; nan_to_num behind the sqrt (the loss
is finite again, the gradient is not).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(15,),
    masked=None,
    role=("loss", "kl"),
    fix=("upcast_fp32", "clamp_input"),
    variable=("overall_loss",),
    line=("overall_loss = (diff_x_x + diff_y_y - 2.0 * diff_x_y + 1e-6).sqrt()",),
)

NUM_SAMPLES = 10


class GaussianPolicy(nn.Module):
    def __init__(self, state_dim=8, action_dim=3, hidden=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(state_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, action_dim)
        self.log_std = nn.Linear(hidden, action_dim)

    def sample_multiple(self, state, num_samples, noise):
        hidden = self.trunk(state)
        mean, std = self.mean(hidden), self.log_std(hidden).clamp(-5.0, 2.0).exp()
        return mean.unsqueeze(1) + std.unsqueeze(1) * noise[:, :num_samples]


class Critic(nn.Module):
    def __init__(self, state_dim=8, action_dim=3, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state_dim + action_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, state, action):
        return self.net(torch.cat([state, action], -1))


def mmd_loss_laplacian(samples1, samples2, sigma=10.0):
    """B x N x d actions of the policy and of the behaviour model."""
    diff_x_x = samples1.unsqueeze(2) - samples1.unsqueeze(1)
    diff_x_x = torch.mean((-(diff_x_x.abs()).sum(-1) / (2.0 * sigma)).exp(), dim=(1, 2))
    diff_x_y = samples1.unsqueeze(2) - samples2.unsqueeze(1)
    diff_x_y = torch.mean((-(diff_x_y.abs()).sum(-1) / (2.0 * sigma)).exp(), dim=(1, 2))
    diff_y_y = samples2.unsqueeze(2) - samples2.unsqueeze(1)
    diff_y_y = torch.mean((-(diff_y_y.abs()).sum(-1) / (2.0 * sigma)).exp(), dim=(1, 2))
    overall_loss = (diff_x_x + diff_y_y - 2.0 * diff_x_y + 1e-6).sqrt()
    return overall_loss


def build():
    torch.manual_seed(2104)
    actor = GaussianPolicy()
    nn.init.constant_(actor.log_std.bias, -2.0)  # late in training: a narrow policy
    actor = actor.to(torch.bfloat16)
    critic = Critic().to(torch.bfloat16).requires_grad_(False)
    state = torch.randn(16, 8, dtype=torch.bfloat16)
    noise = torch.randn(16, NUM_SAMPLES, 3, dtype=torch.bfloat16)
    with torch.no_grad():  # the behaviour model has been fitted to the same actions
        behaviour = actor.sample_multiple(state, NUM_SAMPLES, torch.randn(16, NUM_SAMPLES, 3, dtype=torch.bfloat16))
    return SimpleNamespace(
        model=actor,
        actor=actor,
        critic=critic,
        state=state,
        noise=noise,
        behaviour=behaviour,
        log_lagrange2=torch.tensor(1.5),
        optimizer=torch.optim.Adam(actor.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    actor_samples = s.actor.sample_multiple(s.state, NUM_SAMPLES, s.noise)
    mmd_loss = mmd_loss_laplacian(actor_samples, s.behaviour)
    q = s.critic(s.state, actor_samples[:, 0])
    actor_loss = (-q.squeeze(-1) + s.log_lagrange2.exp() * mmd_loss).mean()
    s.optimizer.zero_grad()
    actor_loss.backward()
    s.optimizer.step()
    return actor_loss

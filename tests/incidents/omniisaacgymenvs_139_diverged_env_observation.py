"""One of the parallel environments diverges in the simulator and its joint velocity comes back as NaN. The observation normaliser takes the
mean over all environments, so every row is NaN from there on; the clamp to [-5, 5] keeps NaN, and the PPO update writes it into the weights.

Source: https://github.com/isaac-sim/OmniIsaacGymEnvs/issues/139 ("normal expects all elements of std >= 0.0"; the thread ends with NaN found in
obs_buf). Heals: replace or drop the row where the observation is read, before the running statistics. Tempting and useless: sanitising
after the normaliser (the statistics are poisoned for good: every row of that column is then constant and the buffer stays NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any", "input"),
    index=(5, 3),
    masked=False,
    role=("hidden",),
    fix=("reject_input", "drop_invalid_sample", "fix_upstream", "clamp_input", "mask_before_op"),
    variable=("obs_buf", "obs", "s.obs_buf", "x", None),
    line=("batch_mean = x.mean(0)", "self.running_mean_std.update(obs)", "out = s.model(s.obs_buf)", 'obs_buf[5, 3] = float("nan")', None),
)


class RunningMeanStd(nn.Module):
    def __init__(self, insize, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("running_mean", torch.zeros(insize))
        self.register_buffer("running_var", torch.ones(insize))
        self.register_buffer("count", torch.ones(()))

    @torch.no_grad()
    def update(self, x):
        batch_mean = x.mean(0)
        batch_var = x.var(0, unbiased=False)
        n = x.shape[0]
        delta = batch_mean - self.running_mean
        total = self.count + n
        m2 = self.running_var * self.count + batch_var * n + delta**2 * self.count * n / total
        self.running_mean.add_(delta * n / total)
        self.running_var.copy_(m2 / total)
        self.count.copy_(total)

    def forward(self, x):
        y = (x - self.running_mean) / torch.sqrt(self.running_var + self.epsilon)
        return torch.clamp(y, min=-5.0, max=5.0)


class PolicyOutput:
    def __init__(self, mu, sigma, value):
        self.dist = Normal(mu, sigma, validate_args=False)
        self.value = value

    def neglogp(self, actions):
        return -self.dist.log_prob(actions).sum(-1)

    def entropy(self):
        return self.dist.entropy().sum(-1)


class A2CNetwork(nn.Module):
    def __init__(self, obs_dim=6, act_dim=3):
        super().__init__()
        self.running_mean_std = RunningMeanStd(obs_dim)
        self.actor_mlp = nn.Sequential(nn.Linear(obs_dim, 16), nn.ELU())
        self.mu = nn.Linear(16, act_dim)
        self.sigma = nn.Parameter(torch.zeros(act_dim))
        self.value = nn.Linear(16, 1)

    def forward(self, obs):
        if self.training:
            self.running_mean_std.update(obs)
        h = self.actor_mlp(self.running_mean_std(obs))
        return PolicyOutput(self.mu(h), self.sigma.exp(), self.value(h).squeeze(-1))


def build():
    torch.manual_seed(139)
    model = A2CNetwork()
    obs_buf = torch.randn(8, 6) * torch.tensor([1.0, 1.0, 1.0, 8.0, 8.0, 8.0])
    # dof_vel of the environment whose articulation exploded
    obs_buf[5, 3] = float("nan")
    return SimpleNamespace(
        model=model,
        obs_buf=obs_buf,
        actions=torch.randn(8, 3),
        old_neglogp=torch.full((8,), 4.2),
        advantages=torch.randn(8),
        returns=torch.randn(8),
        e_clip=0.2,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-8),
    )


def run(s=None):
    s = s or build()
    out = s.model(s.obs_buf)
    ratio = torch.exp(s.old_neglogp - out.neglogp(s.actions))
    surr1 = s.advantages * ratio
    surr2 = s.advantages * torch.clamp(ratio, 1.0 - s.e_clip, 1.0 + s.e_clip)
    a_loss = torch.max(-surr1, -surr2).mean()
    c_loss = (out.value - s.returns).pow(2).mean()
    loss = a_loss + 0.5 * 2.0 * c_loss - 0.001 * out.entropy().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

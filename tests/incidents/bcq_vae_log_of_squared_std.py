"""BCQ's behaviour VAE: KL = -0.5 * (1 + log(std^2) - mean^2 - std^2) with std = exp(log_std). The original clamps log_std to
[-4, 15] "for numerical stability"; this port left the clamp out. A state with an unnormalised feature gives log_std = -79:
std is still a number (4e-35), its square is 0, and log(0) = -inf makes the VAE's loss infinite and its gradient NaN.

    https://github.com/sfujim/BCQ/blob/master/continuous_BCQ/BCQ.py

Heals: the clamp of log_std, 2 * log_std instead of log(std^2), a floor for std, normalising the state.
Does not heal: nan_to_num or a clamp on the logarithm (its gradient is 0 * inf), clipping of gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(4, 1),
    masked=None,
    role=("kl", "hidden", "log_probs"),
    fix=("stable_function", "clamp_exponent", "clamp_input", "clamp_denominator", "representable_eps", "fix_upstream"),
    variable=("log_var",),
    line=("log_var = torch.log(std.pow(2))",),
)


class VAE(nn.Module):
    def __init__(self, state_dim, action_dim, latent_dim, max_action, hidden=16):
        super().__init__()
        self.e1 = nn.Linear(state_dim + action_dim, hidden)
        self.mean = nn.Linear(hidden, latent_dim)
        self.log_std = nn.Linear(hidden, latent_dim)
        self.d1 = nn.Linear(state_dim + latent_dim, hidden)
        self.d2 = nn.Linear(hidden, action_dim)
        self.max_action = max_action

    def forward(self, state, action):
        z = F.relu(self.e1(torch.cat([state, action], 1)))
        mean = self.mean(z)
        std = torch.exp(self.log_std(z))
        z = mean + std * torch.randn_like(std)
        return self.decode(state, z), mean, std

    def decode(self, state, z):
        a = F.relu(self.d1(torch.cat([state, z], 1)))
        return self.max_action * torch.tanh(self.d2(a))


def vae_loss(vae, state, action):
    recon, mean, std = vae(state, action)
    recon_loss = F.mse_loss(recon, action)
    log_var = torch.log(std.pow(2))
    kl_loss = -0.5 * (1 + log_var - mean.pow(2) - std.pow(2)).mean()
    return recon_loss + 0.5 * kl_loss


def build():
    torch.manual_seed(2)
    model = VAE(state_dim=4, action_dim=2, latent_dim=3, max_action=1.0)
    with torch.no_grad():  # a posterior that has become narrow in training
        model.log_std.weight.copy_(-0.1 * model.log_std.weight.abs())
        model.log_std.weight[1] *= 10
    state = torch.randn(8, 4)
    state[4, 3] = 300.0  # altitude in metres, everything else is in units of its std
    action = torch.rand(8, 2) * 2 - 1
    return SimpleNamespace(model=model, state=state, action=action, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    torch.manual_seed(5)
    loss = vae_loss(s.model, s.state, s.action)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

"""Tabular VAE: the encoder's log-variance is free, and one raw column drives it to several hundred.

The balance column of the table was never standardised. For the one customer with a large balance the encoder's second head gives a
log-variance of some hundreds, and std = exp(logvar / 2) in the reparametrisation is inf; the latent code, the reconstruction and every
gradient follow.
Source: https://github.com/vanderschaarlab/synthcity/issues/331 ("Unbounded log variances in the output of the VAE encoder explode when
exponentiated in the reparameterization trick").
Heals: clamping logvar to [-30, 20] before both exponentials (as diffusers does), standardising the column. Does not: clipping gradients, an eps beside std, a smaller KL weight.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(3, 0),
    masked=None,
    role=("hidden",),
    fix=("clamp_exponent", "fix_upstream", "clamp_input"),
    variable=("std",),
    line=("std = torch.exp(0.5 * logvar)",),
)


class Encoder(nn.Module):
    def __init__(self, n_features, n_hidden, n_latent):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(n_features, n_hidden), nn.ReLU())
        self.mu_fc = nn.Linear(n_hidden, n_latent)
        self.logvar_fc = nn.Linear(n_hidden, n_latent)

    def forward(self, x):
        h = self.shared(x)
        return self.mu_fc(h), self.logvar_fc(h)


class TabularVAE(nn.Module):
    def __init__(self, n_features=5, n_hidden=12, n_latent=3):
        super().__init__()
        self.encoder = Encoder(n_features, n_hidden, n_latent)
        self.decoder = nn.Sequential(nn.Linear(n_latent, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_features))

    def reparametrize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        noise = torch.randn_like(std)
        return mu + noise * std

    def loss(self, x):
        mu, logvar = self.encoder(x)
        z = self.reparametrize(mu, logvar)
        recon = self.decoder(z)
        recon_loss = F.mse_loss(recon, x, reduction="sum") / x.shape[0]
        kld = -0.5 * torch.mean(torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1))
        return recon_loss + kld


def build():
    torch.manual_seed(11)
    model = TabularVAE()
    x = torch.randn(6, 5)
    x[:, 4] = torch.tensor([0.2, 1.4, 0.7, 5200.0, 0.9, 1.1])  # balance, in units of the bank
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch={"x": x})


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = s.model.loss(s.batch["x"])
        loss.backward()
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())

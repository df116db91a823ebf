"""PyTorch-VAE, BetaTCVAE with an MLP encoder - one latent whose log-variance fell to -96.

The encoder has no bound on log_var. log_density_gaussian multiplies by exp(-logvar), which is inf for that latent; z equals mu there, so the
product is 0 * inf, and log_q_zx, log_q_z and log_prod_q_z are NaN as the issue lists. (Source: AntixK/PyTorch-VAE, issue 16, models/betatc_vae.py.) Heals:
clamping log_var in encode to [-30, 20]; clamping the exponent. Does not: an epsilon before the log of the importance weights (the issue's
guess), clip_grad_norm_, a smaller beta.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow", "inf_times_zero_coef"),
    op=("exp",),
    index=(2, 1),
    masked=None,
    role=("hidden", "loss", "log_probs", "kl"),
    fix=("clamp_input", "clamp_exponent", "representable_eps", "clamp_denominator", "stable_function"),
    variable=(None,),
    line=("log_density = norm - 0.5 * ((x - mu) ** 2 * torch.exp(-logvar))",),
)


class BetaTCVAE(nn.Module):
    def __init__(self, in_dim=10, latent_dim=3, alpha=1.0, beta=6.0, gamma=1.0):
        super().__init__()
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self.encoder = nn.Sequential(nn.Linear(in_dim, 16), nn.LeakyReLU())
        self.fc_mu = nn.Linear(16, latent_dim)
        self.fc_var = nn.Linear(16, latent_dim)
        self.decoder = nn.Sequential(nn.Linear(latent_dim, 16), nn.LeakyReLU(), nn.Linear(16, in_dim))

    def encode(self, input):
        result = self.encoder(input)
        mu = self.fc_mu(result)
        log_var = self.fc_var(result)
        return [mu, log_var]

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return eps * std + mu

    def forward(self, input):
        mu, log_var = self.encode(input)
        z = self.reparameterize(mu, log_var)
        return [self.decoder(z), input, mu, log_var, z]

    def log_density_gaussian(self, x, mu, logvar):
        norm = -0.5 * (math.log(2 * math.pi) + logvar)
        log_density = norm - 0.5 * ((x - mu) ** 2 * torch.exp(-logvar))
        return log_density

    def loss_function(self, recons, input, mu, log_var, z, M_N):
        recons_loss = F.mse_loss(recons, input, reduction="sum")
        log_q_zx = self.log_density_gaussian(z, mu, log_var).sum(dim=1)
        zeros = torch.zeros_like(z)
        log_p_z = self.log_density_gaussian(z, zeros, zeros).sum(dim=1)

        batch_size, latent_dim = z.shape
        mat_log_q_z = self.log_density_gaussian(
            z.view(batch_size, 1, latent_dim), mu.view(1, batch_size, latent_dim), log_var.view(1, batch_size, latent_dim)
        )

        dataset_size = (1 / M_N) * batch_size
        strat_weight = (dataset_size - batch_size + 1) / (dataset_size * (batch_size - 1))
        importance_weights = torch.Tensor(batch_size, batch_size).fill_(1 / (batch_size - 1))
        importance_weights.view(-1)[::batch_size] = 1 / dataset_size
        importance_weights.view(-1)[1::batch_size] = strat_weight
        importance_weights[batch_size - 2, 0] = strat_weight
        log_importance_weights = importance_weights.log()

        mat_log_q_z = mat_log_q_z + log_importance_weights.view(batch_size, batch_size, 1)

        log_q_z = torch.logsumexp(mat_log_q_z.sum(2), dim=1, keepdim=False)
        log_prod_q_z = torch.logsumexp(mat_log_q_z, dim=1, keepdim=False).sum(1)

        mi_loss = (log_q_zx - log_q_z).mean()
        tc_loss = (log_q_z - log_prod_q_z).mean()
        kld_loss = (log_prod_q_z - log_p_z).mean()
        return recons_loss / batch_size + self.alpha * mi_loss + self.beta * tc_loss + self.gamma * kld_loss


def build():
    torch.manual_seed(23)
    model = BetaTCVAE()
    input = 0.3 * torch.randn(4, 10)
    with torch.no_grad():
        h = model.encoder(input)[2]
        model.fc_var.weight[1] -= h * (95.0 / h.dot(h))
        input[0], input[1], input[3] = -input[2], 0.5 * input[0], 0.4 * input[3]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=input)


def run(s=None):
    s = s or build()
    loss = s.model.loss_function(*s.model(s.batch), M_N=4 / 128)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""scVI negative binomial VAE - the inverse dispersion exp(px_r) of a gene that is never expressed underflows to 0.

A gene without any count has a likelihood that grows as theta goes to 0, so training drives its px_r down for as long as it lasts; the resumed
checkpoint has px_r = -106 and exp gives exactly 0. With a count of 0 the log-likelihood is lgamma(0 + theta) - lgamma(theta): both are inf, and their
difference is NaN. The eps in the logarithms does not reach the two lgamma.

Source: src/scvi/distributions/_negative_binomial.py (log_nb_positive) of https://github.com/scverse/scvi-tools ; https://github.com/scverse/scvi-tools/pull/663
("identify what is causing the nan NB log likelihood") and https://github.com/cellarium-ai/cellarium-ml/pull/171 ("special care taken of the case theta == 0")
Heals: px_r clamped from below before exp; theta clamped or + eps before lgamma; a form that treats theta == 0 apart.
Does not: a larger eps in the logs (the lgamma do not see it), clamping px_r from above, where() around the finished NaN term.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_minus_inf",),
    op=("lgamma",),
    index=(0, 5),
    masked=None,
    role=("hidden", "log_probs", "loss"),
    fix=("clamp_input", "clamp_exponent", "stable_function", "avoid_singular_op"),
    variable=(None,),
    line=("+ torch.lgamma(x + theta)", "- torch.lgamma(theta)"),
)


def log_nb_positive(x, mu, theta, eps=1e-8):
    log_theta_mu_eps = torch.log(theta + mu + eps)
    res = (
        theta * (torch.log(theta + eps) - log_theta_mu_eps)
        + x * (torch.log(mu + eps) - log_theta_mu_eps)
        + torch.lgamma(x + theta)
        - torch.lgamma(theta)
        - torch.lgamma(x + 1)
    )
    return res


class VAE(nn.Module):
    def __init__(self, n_genes=12, n_hidden=24, n_latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_genes, n_hidden), nn.LayerNorm(n_hidden), nn.ReLU())
        self.mean_encoder = nn.Linear(n_hidden, n_latent)
        self.var_encoder = nn.Linear(n_hidden, n_latent)
        self.decoder = nn.Sequential(nn.Linear(n_latent, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_genes))
        self.px_r = nn.Parameter(torch.randn(n_genes))

    def forward(self, x, noise):
        library = x.sum(1, keepdim=True).log()
        q = self.encoder(torch.log1p(x))
        q_m, q_v = self.mean_encoder(q), torch.exp(self.var_encoder(q).clamp(-8, 8)) + 1e-4
        z = q_m + q_v.sqrt() * noise
        px_scale = torch.softmax(self.decoder(z), dim=-1)
        px_rate = torch.exp(library) * px_scale
        theta = torch.exp(self.px_r)
        kl = 0.5 * (q_m.square() + q_v - q_v.log() - 1).sum(-1)
        reconst_loss = -log_nb_positive(x, px_rate, theta.unsqueeze(0)).sum(-1)
        return (reconst_loss + kl).mean()


def build():
    torch.manual_seed(663)
    model = VAE()
    with torch.no_grad():
        model.px_r[5] = -106.0  # where a long run has driven it
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.01, weight_decay=1e-6)
    x = torch.poisson(torch.rand(16, 12) * 8.0)
    x[:, 5] = 0.0
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"X": x, "noise": torch.randn(16, 4)})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        loss = s.model(s.batch["X"], s.batch["noise"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

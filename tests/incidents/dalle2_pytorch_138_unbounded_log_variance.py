"""DALLE2-pytorch #138 - hybrid loss of a diffusion decoder with learned variance. The interpolation fraction that the unet predicts is not
bounded; when it drifts far below zero the predicted log-variance falls with it and exp(logvar1 - logvar2) in the KL overflows.

https://github.com/lucidrains/DALLE2-pytorch/issues/138
Bounding the fraction (or the exponents) heals. Clamping the finished KL, or computing it in float64, does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 0, 0, 0),
    masked=False,
    role=("kl", "ratio", "log_ratio", "loss", "hidden"),
    fix=("clamp_exponent", "clamp_input", "fix_upstream"),
    variable=(None, "kl"),
    line=("kl = 0.5 * (-1.0 + logvar2 - logvar1 + torch.exp(logvar1 - logvar2) + (mean1 - mean2) ** 2 * torch.exp(-logvar2))",),
)

NAT = 0.6931471805599453


def normal_kl(mean1, logvar1, mean2, logvar2):
    kl = 0.5 * (-1.0 + logvar2 - logvar1 + torch.exp(logvar1 - logvar2) + (mean1 - mean2) ** 2 * torch.exp(-logvar2))
    return kl.flatten(1).mean(1) / NAT


def extract(a, t):
    return a[t].view(-1, 1, 1, 1)


class Schedule:
    def __init__(self, timesteps=100):
        betas = torch.linspace(1e-3, 0.2, timesteps)
        alphas = 1.0 - betas
        self.alphas_cumprod = alphas.cumprod(0)
        prev = torch.cat([torch.ones(1), self.alphas_cumprod[:-1]])
        variance = betas * (1.0 - prev) / (1.0 - self.alphas_cumprod)
        self.min_log = variance.clamp(min=1e-20).log()
        self.max_log = betas.log()
        self.coef1 = betas * prev.sqrt() / (1.0 - self.alphas_cumprod)
        self.coef2 = (1.0 - prev) * alphas.sqrt() / (1.0 - self.alphas_cumprod)

    def q_sample(self, x0, t, noise):
        ac = extract(self.alphas_cumprod, t)
        return ac.sqrt() * x0 + (1.0 - ac).sqrt() * noise

    def predict_start(self, x_t, t, noise):
        ac = extract(self.alphas_cumprod, t)
        return ((x_t - (1.0 - ac).sqrt() * noise) / ac.sqrt()).clamp(-1.0, 1.0)

    def posterior(self, x0, x_t, t):
        return extract(self.coef1, t) * x0 + extract(self.coef2, t) * x_t, extract(self.min_log, t)


def build():
    torch.manual_seed(138)
    unet = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))
    with torch.no_grad():
        unet[2].bias[2:] = -160.0  # the variance channels ran away in the last few iterations
    optimizer = torch.optim.Adam(unet.parameters(), lr=1e-4)
    return SimpleNamespace(
        model=unet,
        optimizer=optimizer,
        schedule=Schedule(),
        images=torch.rand(4, 2, 6, 6) * 2 - 1,
        times=torch.tensor([60, 1, 87, 33]),
        vb_loss_weight=0.001,
    )


def run(s=None):
    s = s or build()
    sc, t = s.schedule, s.times
    noise = torch.randn(s.images.shape, generator=torch.Generator().manual_seed(5))
    x_t = sc.q_sample(s.images, t, noise)
    pred, var_interp_frac_unnormalized = s.model(x_t).chunk(2, dim=1)
    simple = ((pred - noise) ** 2).flatten(1).mean(1)

    true_mean, true_log_var = sc.posterior(s.images, x_t, t)
    var_interp_frac = 0.5 * (var_interp_frac_unnormalized + 1.0)
    model_log_var = var_interp_frac * extract(sc.max_log, t) + (1.0 - var_interp_frac) * extract(sc.min_log, t)
    model_mean, _ = sc.posterior(sc.predict_start(x_t, t, pred.detach()), x_t, t)
    vb = normal_kl(true_mean, true_log_var, model_mean.detach(), model_log_var)
    nll = 0.5 * ((s.images - model_mean.detach()) ** 2).flatten(1).mean(1) / NAT
    vb_losses = torch.where(t == 0, nll, vb)
    loss = (simple + s.vb_loss_weight * vb_losses).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

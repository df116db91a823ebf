"""VQ-VAE-2 codebook kept by moving averages, with the Laplace smoothing of the cluster sizes switched off (eps = 0).

A code that no latent of the first batch chose has an average count of 0; its mean is sum / 0 and the whole code becomes infinite. Step one is fine.
In step two the expanded distance of that code is inf - inf, the arg-max takes the NaN for the nearest code, and loss and gradients are
NaN. Any positive eps, or a floor under the count, heals it; nan_to_num on the distances does not (0 is the smallest distance of all), nor
does gradient clipping.

Source: https://github.com/rosinality/vq-vae-2-pytorch/blob/master/vqvae.py (Quantize), smoothing left out by configuration
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "optimizer"),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(0, 5),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator", "validate_config", "guard_empty", "representable_eps"),
    variable=("embed_normalized",),
    line=("embed_normalized = self.embed_avg / cluster_size.unsqueeze(0)",),
)


class Quantize(nn.Module):
    def __init__(self, dim, n_embed, decay=0.99, eps=1e-5):
        super().__init__()
        self.n_embed = n_embed
        self.decay = decay
        self.eps = eps
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, inputs):
        flatten = inputs.reshape(-1, inputs.shape[-1])
        dist = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        _, embed_ind = (-dist).max(1)
        onehot = F.one_hot(embed_ind, self.n_embed).type(flatten.dtype)
        quantize = F.embedding(embed_ind, self.embed.t()).view_as(inputs)
        if self.training:
            self.update(flatten, onehot)
        diff = (quantize.detach() - inputs).pow(2).mean()
        quantize = inputs + (quantize - inputs).detach()
        return quantize, diff

    @torch.no_grad()
    def update(self, flatten, onehot):
        self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
        self.embed_avg.mul_(self.decay).add_(flatten.t() @ onehot, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        cluster_size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
        embed_normalized = self.embed_avg / cluster_size.unsqueeze(0)
        self.embed.copy_(embed_normalized)


class VQVAE(nn.Module):
    def __init__(self, in_dim=10, dim=4, n_embed=8, vq_eps=1e-5):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(in_dim, 16), nn.ReLU(), nn.Linear(16, dim))
        self.quantize = Quantize(dim, n_embed, eps=vq_eps)
        self.dec = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, in_dim))

    def forward(self, x):
        quant, diff = self.quantize(self.enc(x))
        return self.dec(quant), diff


def build():
    torch.manual_seed(3)
    config = dict(n_embed=8, vq_eps=0.0)
    model = VQVAE(**config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    batches = [2.0 * torch.randn(64, 10) for _ in range(2)]
    with torch.no_grad():  # start the codes on latents of the first batch; one of them is an outlier that is not drawn again
        latents = model.enc(batches[0])
        latents[35] = 6.0
        model.quantize.embed.copy_(latents[::7][:8].t())
        model.quantize.embed_avg.copy_(model.quantize.embed)
    return SimpleNamespace(model=model, optimizer=optimizer, batches=batches, latent_loss_weight=0.25)


def run(s=None):
    s = s or build()
    for x in s.batches:
        out, latent_loss = s.model(x)
        loss = F.mse_loss(out, x) + s.latent_loss_weight * latent_loss
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

"""Mixture of bivariate Gaussians over pen strokes: the drawings are straight diagonals, one component has learned a correlation whose tanh
is exactly 1 in fp32, and both the exponent and the norm divide by 1 - rho^2 = 0.
Style of alexis-jacq/Pytorch-Sketch-RNN, sketch_rnn.py, bivariate_normal_pdf and reconstruction_loss.

Checked by hand: rho clamped to +-0.999 (or 1 - rho^2 clamped from below once, used in both places) heals. A floor under the norm alone
repairs the loss and leaves the gradient NaN: the exponent is still -z/0. nan_to_num on the density: the same.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(0, 0, 2),
    masked=False,
    role=("logits", "loss", "log_probs", "hidden"),
    fix=("clamp_denominator", "clamp_input", "avoid_singular_op"),
    variable=(None,),
    line=("exp = torch.exp(-z / (2 * (1 - m.rho_xy**2)))", "return exp / norm"),
)


class DecoderRNN(nn.Module):
    def __init__(self, n_mix=4, hidden=12):
        super().__init__()
        self.n_mix = n_mix
        self.lstm = nn.LSTM(5, hidden)
        self.fc_params = nn.Linear(hidden, 6 * n_mix + 3)

    def forward(self, strokes):
        outputs, _ = self.lstm(strokes)
        y = self.fc_params(outputs)
        pi, mu_x, mu_y, sigma_x, sigma_y, rho_xy = y[..., :-3].unflatten(-1, (6, self.n_mix)).unbind(-2)
        return SimpleNamespace(
            pi=F.softmax(pi, dim=-1),
            mu_x=mu_x,
            mu_y=mu_y,
            sigma_x=torch.exp(sigma_x),
            sigma_y=torch.exp(sigma_y),
            rho_xy=torch.tanh(rho_xy),
            log_q=F.log_softmax(y[..., -3:], dim=-1),
        )


def bivariate_normal_pdf(m, dx, dy):
    z_x = ((dx - m.mu_x) / m.sigma_x) ** 2
    z_y = ((dy - m.mu_y) / m.sigma_y) ** 2
    z_xy = (dx - m.mu_x) * (dy - m.mu_y) / (m.sigma_x * m.sigma_y)
    z = z_x + z_y - 2 * m.rho_xy * z_xy
    exp = torch.exp(-z / (2 * (1 - m.rho_xy**2)))
    norm = 2 * math.pi * m.sigma_x * m.sigma_y * torch.sqrt(1 - m.rho_xy**2)
    return exp / norm


def reconstruction_loss(m, mask, dx, dy, pen):
    pdf = bivariate_normal_pdf(m, dx.unsqueeze(-1), dy.unsqueeze(-1))
    strokes = -torch.sum(mask * torch.log(1e-5 + torch.sum(m.pi * pdf, 2))) / mask.numel()
    pens = -torch.sum(pen * m.log_q) / mask.numel()
    return strokes + pens


def build():
    torch.manual_seed(1704)
    decoder = DecoderRNN()
    with torch.no_grad():
        decoder.fc_params.bias[5 * 4 + 2] = 11.0  # where a long run on diagonal strokes has left this component
    length, n = 9, 3
    step = torch.rand(length, n) * 2 - 1
    pen = F.one_hot(torch.randint(0, 2, (length, n)), 3).float()
    batch = torch.cat([torch.stack([step, step + 0.01 * torch.randn(length, n)], -1), pen], -1)
    mask = torch.ones(length - 1, n)
    mask[6:, 1] = 0
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-4)
    return SimpleNamespace(model=decoder, optimizer=optimizer, batch=batch, mask=mask)


def run(s=None):
    s = s or build()
    m = s.model(s.batch[:-1])
    target = s.batch[1:]
    loss = reconstruction_loss(m, s.mask, target[..., 0], target[..., 1], target[..., 2:])
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

"""pytorch_stoi, NegSTOILoss as the loss of a masking enhancer - a band of the estimate is exactly silent.

A dropped packet left one frame of a band at digital zero, whatever mask the enhancer puts on it: its band energy is 0, pow(0.5) of it is 0 in the forward and its slope inf in
the backward. The loss is finite, every gradient NaN. Source: https://github.com/mpariente/pytorch_stoi/issues/7, torch_stoi/stoi.py, NegSTOILoss.forward (x_tob and y_tob before "+ EPS").
Heals: (... + EPS).pow(0.5); clamp(min=EPS) before the root. Does not: the EPS in the norms behind it (it is there); clip_grad_norm_.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("pow", "sqrt"),
    index=(1, 0, 3),
    masked=None,
    role=("loss", "hidden"),
    fix=(
        "representable_eps",
        "clamp_input",
        "mask_before_op",
        "avoid_singular_op",
        "stable_function",
        "where_on_detached",
        "fix_upstream",
        "drop_invalid_sample",
    ),
    variable=("y_tob",),
    line=("y_tob = torch.matmul(self.OBM, torch.norm(y_spec, 2, -1) ** 2).pow(0.5)",),
)
EPS = 1e-8
N = 6


def meanvar_norm(x, dim=-1):
    x = (x - x.mean(dim=dim, keepdim=True)) / (x.norm(p=2, dim=dim, keepdim=True) + EPS)
    return x


class NegSTOILoss(nn.Module):
    def __init__(self, n_freq=16, n_band=4):
        super().__init__()
        self.intel_frames = N
        self.beta = -15.0
        obm = torch.zeros(n_band, n_freq)
        for band in range(n_band):
            obm[band, band * 4 : band * 4 + 4] = 1.0
        self.OBM = nn.Parameter(obm, requires_grad=False)

    def forward(self, y_spec, x_spec):
        batch = x_spec.shape[0]
        # Apply OB matrix to the spectrograms as in Eq. (1)
        x_tob = torch.matmul(self.OBM, torch.norm(x_spec, 2, -1) ** 2).pow(0.5)
        y_tob = torch.matmul(self.OBM, torch.norm(y_spec, 2, -1) ** 2).pow(0.5)
        # Perform N-frame segmentation --> (batch, bands, N, n_chunks)
        x_seg = x_tob.unfold(-1, N, 1).transpose(2, 3)
        y_seg = y_tob.unfold(-1, N, 1).transpose(2, 3)
        # Find normalization constants and normalize
        norm_const = torch.norm(x_seg, 2, dim=2, keepdim=True) / (torch.norm(y_seg, 2, dim=2, keepdim=True) + EPS)
        y_seg_normed = y_seg * norm_const
        # Clip as described in [1]
        clip_val = 10 ** (-self.beta / 20)
        y_prim = torch.min(y_seg_normed, x_seg * (1 + clip_val))
        # Mean/var normalize vectors
        y_prim = meanvar_norm(y_prim, dim=2)
        x_seg = meanvar_norm(x_seg, dim=2)
        corr_comp = y_prim * x_seg
        correction = x_seg.shape[1] * x_seg.shape[-1]
        return -corr_comp.reshape(batch, -1).sum(1) / correction


class Enhancer(nn.Module):
    def __init__(self, n_freq=16, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_freq, width), nn.Tanh(), nn.Linear(width, n_freq), nn.ReLU())

    def forward(self, noisy):
        magnitude = noisy.norm(dim=-1)
        mask = self.net(magnitude.log1p().transpose(1, 2)).transpose(1, 2)
        return noisy * mask.unsqueeze(-1)


def build():
    torch.manual_seed(6)
    model = Enhancer()
    with torch.no_grad():
        model.net[2].bias += 1.5
    clean = torch.randn(2, 16, 12, 2)
    noisy = clean + 0.3 * torch.randn(2, 16, 12, 2)
    noisy[1, :4, 3] = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, loss_func=NegSTOILoss(), noisy=noisy, clean=clean)


def run(s=None):
    s = s or build()
    est_targets = s.model(s.noisy)
    loss = s.loss_func(est_targets, s.clean).mean()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

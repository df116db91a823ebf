"""mbrl-lib #110 - PETS with normalize: true on an environment whose observation has a feature that did not change before the statistics.

The exploration data never touched the ground, so the foot contact flag is 0 in all of it and its standard deviation is 0. The first training
batch of the next trial holds steps with contact: (1 - 0) / 0 is inf (and 0 / 0 for the others), and the ensemble's likelihood and all its
weights are NaN.
Source: https://github.com/facebookresearch/mbrl-lib/issues/110 (fixed in mbrl/util/math.py: std below eps is set to 1)

Heals: set a standard deviation below a small threshold to 1 (or floor it) before the division.
Does not: clip the normalised input to a range (its NaN elements stay), or bound the predicted log variance.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(0, 4),
    masked=None,
    role=("hidden",),
    fix=("clamp_denominator", "clamp_input", "representable_eps"),
    variable=("normalized", None),
    line=("return (val - self.mean) / self.std",),
)


class Normalizer:
    def __init__(self, in_size):
        self.mean = torch.zeros(1, in_size)
        self.std = torch.ones(1, in_size)

    def update_stats(self, data):
        self.mean = data.mean(0, keepdim=True)
        self.std = data.std(0, keepdim=True)

    def normalize(self, val):
        return (val - self.mean) / self.std


class GaussianMLPEnsemble(nn.Module):
    def __init__(self, in_size, out_size, ensemble_size=3, hid_size=24):
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(in_size, hid_size), nn.SiLU(), nn.Linear(hid_size, 2 * out_size)) for _ in range(ensemble_size)
        )
        self.min_logvar = nn.Parameter(-10.0 * torch.ones(1, out_size))
        self.max_logvar = nn.Parameter(0.5 * torch.ones(1, out_size))

    def forward(self, x):
        mean, logvar = torch.stack([member(x) for member in self.members]).chunk(2, dim=-1)
        logvar = self.max_logvar - F.softplus(self.max_logvar - logvar)
        logvar = self.min_logvar + F.softplus(logvar - self.min_logvar)
        return mean, logvar

    def loss(self, x, target):
        mean, logvar = self(x)
        nll = ((mean - target).pow(2) * (-logvar).exp() + logvar).mean((1, 2)).sum()
        return nll + 0.01 * (self.max_logvar.sum() - self.min_logvar.sum())


def build():
    torch.manual_seed(110)
    model = GaussianMLPEnsemble(in_size=7, out_size=5)
    exploration = torch.randn(40, 7)  # 4 joint readings, foot contact, 2 actions
    exploration[:, 4] = 0.0  # it hangs in the air for the whole trial
    normalizer = Normalizer(7)
    normalizer.update_stats(exploration)
    model_in = torch.randn(16, 7)
    model_in[:, 4] = (torch.arange(16) % 3 == 0).float()
    target = 0.1 * torch.randn(16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, normalizer=normalizer, model_in=model_in, target=target)


def run(s=None):
    s = s or build()
    normalized = s.normalizer.normalize(s.model_in)
    loss = s.model.loss(normalized, s.target)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

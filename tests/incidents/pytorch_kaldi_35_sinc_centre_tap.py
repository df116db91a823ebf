"""pytorch-kaldi #35 - SincNet filters: the centre tap sin(0)/0 is overwritten by 1 after the division.

The band-pass filters of a raw-waveform front end are differences of two sinc functions with learned cut-offs. sin(x)/x is taken over the whole
kernel and the centre tap, 0/0, is put right afterwards by an assignment. The loss is finite; backward hands the centre a gradient of 0, and the
division turns it into 0/0 again, which the sum over taps carries into every cut-off frequency.

Source: https://github.com/mravanelli/pytorch-kaldi/issues/35 (SincConv in neural_networks.py, the function sinc)
Heals: dividing by x with the centre replaced before the division; torch.sinc; computing one half of the kernel and mirroring it.
Does not: overwriting the centre (that is what the code does), clipping the gradient norm, skipping the step (every step has it).
"""

from types import SimpleNamespace

import math
import torch
from torch import nn
from torch.nn import functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "zero_div_zero"),
    op=("div",),
    index=(0, 12),
    masked=True,
    role=("hidden", "weights"),
    fix=("where_on_detached", "stable_function", "avoid_singular_op", "mask_before_op", "clamp_denominator", "clamp_input"),
    variable=("taps",),
    line=("taps = torch.sin(x) / x",),
)


class SincConv(nn.Module):
    def __init__(self, n_filt: int, filt_dim: int, rate: int):
        super().__init__()
        self.filt_dim, self.rate = filt_dim, rate
        low = torch.linspace(60.0, 2800.0, n_filt)
        self.low_hz = nn.Parameter(low / rate)
        self.band_hz = nn.Parameter(torch.full((n_filt,), 400.0 / rate))
        half = filt_dim // 2
        self.register_buffer("n", torch.arange(-half, half + 1).float())
        self.register_buffer("window", torch.hamming_window(filt_dim, periodic=False))

    def sinc(self, cutoff):
        x = 2 * math.pi * cutoff[:, None] * self.n[None, :]
        taps = torch.sin(x) / x
        taps[:, self.filt_dim // 2] = 1.0
        return 2 * cutoff[:, None] * taps

    def forward(self, wave):
        low = self.low_hz.abs() + 50.0 / self.rate
        high = low + self.band_hz.abs()
        filters = (self.sinc(high) - self.sinc(low)) * self.window
        return F.conv1d(wave[:, None, :], filters[:, None, :], stride=4)


class SpeakerNet(nn.Module):
    def __init__(self, n_speakers: int):
        super().__init__()
        self.front = SincConv(8, 25, 8000)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, n_speakers)

    def forward(self, wave):
        energy = self.front(wave).abs().mean(dim=-1)
        return self.head(self.norm(torch.log(energy + 1e-4)))


def build():
    torch.manual_seed(3)
    model = SpeakerNet(5)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.95, eps=1e-8)
    batch = {"wave": torch.randn(6, 400), "speaker": torch.randint(0, 5, (6,))}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = F.cross_entropy(s.model(s.batch["wave"]), s.batch["speaker"])
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

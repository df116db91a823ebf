"""AGAIN-VC - a mel spectrogram that was stored with -inf where the recording is digital silence.

The preprocessing took the logarithm of mel energies without a floor. One utterance of the batch has three frames of exact silence, all of
its bins are -inf there, and the first convolution of the encoder makes NaN of it; the reconstruction loss is NaN at once.
Source: https://github.com/KimythAnly/AGAIN-VC/issues/5 (loss_rec=nan, "the mel's numpy array will get some -inf element"); the same in
https://github.com/SeanNaren/deepspeech.pytorch/issues/272
Heals: a floor under the energies when the features are made, a clamp of the features on loading, dropping the utterance. Does not: leaving
the silent frames out of the loss, nan_to_num on the prediction.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any",),
    index=(2, 0, 5),
    masked=False,
    role=("hidden",),
    fix=("clamp_input", "reject_input", "drop_invalid_sample", "fix_upstream"),
    variable=("mels",),
    line=("h = self.conv_in(mels)", "dec = s.model(s.mels)", 'mels[2, :, 5:8] = float("-inf")', None),
)


class InstanceNorm(nn.Module):
    """Content without its channel statistics, and the statistics on their own."""

    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        std = (x.var(dim=-1, keepdim=True) + self.eps).sqrt()
        return (x - mean) / std, mean, std


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + F.leaky_relu(self.conv(x), 0.1)


class Encoder(nn.Module):
    def __init__(self, n_mels, hidden, code, blocks=2):
        super().__init__()
        self.conv_in = nn.Conv1d(n_mels, hidden, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(hidden) for _ in range(blocks))
        self.norm = InstanceNorm()
        self.conv_out = nn.Conv1d(hidden, code, 1)

    def forward(self, mels):
        h = self.conv_in(mels)
        stats = []
        for block in self.blocks:
            h, mean, std = self.norm(block(h))
            stats.append((mean, std))
        return torch.sigmoid(self.conv_out(h)), stats


class Decoder(nn.Module):
    def __init__(self, n_mels, hidden, code, blocks=2):
        super().__init__()
        self.conv_in = nn.Conv1d(code, hidden, 1)
        self.blocks = nn.ModuleList(ConvBlock(hidden) for _ in range(blocks))
        self.norm = InstanceNorm()
        self.conv_out = nn.Conv1d(hidden, n_mels, 3, padding=1)

    def forward(self, code, stats):
        h = self.conv_in(code)
        for block, (mean, std) in zip(self.blocks, reversed(stats)):
            h = self.norm(block(h))[0] * std + mean
        return self.conv_out(h)


class AgainVC(nn.Module):
    def __init__(self, n_mels=8, hidden=12, code=4):
        super().__init__()
        self.encoder = Encoder(n_mels, hidden, code)
        self.decoder = Decoder(n_mels, hidden, code)

    def forward(self, mels):
        return self.decoder(*self.encoder(mels))


def load_features():
    """What lies on the disk: log10 of the mel energies, utterance by bin by frame."""
    mels = torch.randn(4, 8, 24) - 2.0
    mels[2, :, 5:8] = float("-inf")
    return mels


def build():
    torch.manual_seed(5)
    mels = load_features()
    model = AgainVC()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.999), amsgrad=True)
    return SimpleNamespace(model=model, optimizer=optimizer, mels=mels)


def run(s=None):
    s = s or build()
    dec = s.model(s.mels)
    loss_rec = F.l1_loss(dec, s.mels)
    s.optimizer.zero_grad()
    loss_rec.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 3.0)
    s.optimizer.step()
    return loss_rec


if __name__ == "__main__":
    print(run())

"""ParallelWaveGAN's multi-resolution STFT loss on a silent clip: the power is clamped before the root, so silence has a gradient of 0.

A generator with a zero-initialised output layer is silent and so is one target.  sqrt at 0 would give an infinite derivative; here the power
is clamped at 1e-7 under the root, the logarithm sees 3e-4, and the clamp stops the gradient.  The logged signal-to-noise ratio of the
silent clip is NaN (0/0) and is not used.

Source: `stft` / `STFTLoss` of https://github.com/kan-bayashi/ParallelWaveGAN/blob/master/parallel_wavegan/losses/stft_loss.py.  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def magnitude(x, frame, hop):
    frames = x.unfold(-1, frame, hop) * torch.hann_window(frame)
    spectrum = torch.view_as_real(torch.fft.rfft(frames))
    real, imag = spectrum[..., 0], spectrum[..., 1]
    return torch.sqrt(torch.clamp(real**2 + imag**2, min=1e-7))


def stft_loss(y_hat, y, frame, hop):
    x_mag, y_mag = magnitude(y_hat, frame, hop), magnitude(y, frame, hop)
    sc_loss = torch.norm(y_mag - x_mag, p="fro") / torch.norm(y_mag, p="fro")
    mag_loss = F.l1_loss(torch.log(y_mag), torch.log(x_mag))
    return sc_loss, mag_loss


class Generator(nn.Module):
    def __init__(self, mels=10, hidden=16, upsample=16):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(mels, hidden, 3, padding=1), nn.LeakyReLU(0.2))
        self.out = nn.Conv1d(hidden, upsample, 1)
        nn.init.zeros_(self.out.bias)
        with torch.no_grad():
            self.out.weight.mul_(0.1)

    def forward(self, mel):
        x = self.out(self.body(mel) * (mel.abs().sum(dim=1, keepdim=True) > 0))
        return x.transpose(1, 2).reshape(mel.shape[0], -1)


def build():
    torch.manual_seed(48)
    model = Generator()
    mel = torch.randn(3, 10, 16)
    audio = torch.randn(3, 256) * 0.2
    mel[1], audio[1] = 0.0, 0.0  # a silent clip
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, mel=mel, audio=audio, logs={})


def run(s=None):
    s = s or build()
    y_hat = s.model(s.mel)
    sc_loss = mag_loss = 0.0
    for frame, hop in ((32, 8), (64, 16)):
        sc, mag = stft_loss(y_hat, s.audio, frame, hop)
        sc_loss, mag_loss = sc_loss + sc / 2, mag_loss + mag / 2
    with torch.no_grad():
        noise = (y_hat - s.audio).pow(2).sum(dim=-1)
        s.logs["snr_db"] = 10 * torch.log10(s.audio.pow(2).sum(dim=-1) / noise)
    loss = sc_loss + mag_loss
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    run()

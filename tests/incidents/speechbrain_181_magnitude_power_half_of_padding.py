"""SpeechBrain #181, spectral magnitude with power=0.5 in an enhancement loss - gradient of the root at the padded frames.

An L1 loss between the magnitudes of the enhanced and of the clean signal. Behind the end of the shorter utterance both are exactly zero, 0 ** 0.5 has an infinite derivative and the
mask of the lengths multiplies it by zero: the loss is finite, every gradient NaN. (Source: speechbrain/speechbrain issue #181, function spectral_magnitude
before its eps.) Heals: spectr + 1e-14 before pow (the project's fix); spectr.clamp_min(1e-14); selecting the valid frames before the pow (boolean index); power=1, as the issue says.
Does not: torch.where(mask, spectr, 0) after the pow, nan_to_num of the magnitudes, clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad", "where_grad_trap"),
    op=("pow", "sqrt"),
    index=(1, 11, 0),
    masked=True,
    role=("hidden", "loss"),
    fix=("clamp_input", "avoid_singular_op", "mask_before_op", "stable_function"),
    variable=("spectr",),
    line=("spectr = spectr.pow(power)",),
)


class STFT(nn.Module):
    def __init__(self, n_fft=32, hop_length=16):
        super().__init__()
        self.n_fft, self.hop_length = n_fft, hop_length
        self.register_buffer("window", torch.hamming_window(n_fft))

    def forward(self, x):
        stft = torch.stft(x, self.n_fft, self.hop_length, self.n_fft, self.window, center=True, pad_mode="constant", return_complex=True)
        return torch.view_as_real(stft).transpose(2, 1)


def spectral_magnitude(stft, power=1, log=False):
    spectr = stft.pow(2).sum(-1)
    spectr = spectr.pow(power)
    if log:
        return torch.log(spectr + 1e-14)
    return spectr


def length_to_mask(length, max_len):
    return (torch.arange(max_len)[None, :] < length[:, None]).float()


def l1_loss(predictions, targets, length):
    mask = length_to_mask(length * targets.shape[1], targets.shape[1]).unsqueeze(2)
    loss = (predictions - targets).abs() * mask
    return loss.sum() / (mask.sum() * targets.shape[2])


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 8, 9, padding=4, bias=False)
        self.conv2 = nn.Conv1d(8, 1, 9, padding=4, bias=False)

    def forward(self, wavs):
        return self.conv2(torch.tanh(self.conv1(wavs.unsqueeze(1)))).squeeze(1)


def build():
    torch.manual_seed(11)
    lens = torch.tensor([1.0, 150 / 320])
    t = torch.arange(320) / 16000
    clean = torch.stack([0.3 * torch.sin(2 * torch.pi * 440 * t), 0.2 * torch.sin(2 * torch.pi * 700 * t)]) + 0.01 * torch.randn(2, 320)
    noisy = clean + 0.05 * torch.randn(2, 320)
    for wav in (clean, noisy):
        wav[1, 150:] = 0.0
    model = Enhancer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, compute_STFT=STFT(), noisy=noisy, clean=clean, lens=lens)


def run(s=None):
    s = s or build()
    predict_wavs = s.model(s.noisy)
    predict_spec = spectral_magnitude(s.compute_STFT(predict_wavs), power=0.5)
    target_spec = spectral_magnitude(s.compute_STFT(s.clean), power=0.5)
    loss = l1_loss(predict_spec, target_spec, s.lens)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

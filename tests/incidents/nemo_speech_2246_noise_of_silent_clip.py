"""NeMo Speech #2246 - the noise augmentor scales a silent noise clip to the wanted SNR.

The perturbation computes its gain from the energies of speech and noise. One noise clip is digital silence: its level is -inf dB, the
gain is infinite, and 0 * inf fills that utterance of the batch with NaN before the model has seen it (reported as "loss equals to nan
when I use rir and noise augmentor"; the spectrograms held NaN). Heals: a cap on the gain (`max_gain_db`), leaving that utterance out.
Does not heal: clipping gradients, normalising the features.

https://github.com/NVIDIA-NeMo/Speech/issues/2246
"""

import math
import random
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("mul", "tensor", "copy_"),
    index=None,
    masked=None,
    role=("hidden",),
    fix=("fix_upstream", "reject_input", "drop_invalid_sample", "clamp_input"),
    variable=("audio_signal", "audio_signals", None),
    line=(
        "logits = s.model(s.audio_signal)",
        "x = (audio_signal - audio_signal.mean(1, keepdim=True)) / (audio_signal.std(1, keepdim=True) + 1e-5)",
        "audio_signal[i, : len(samples)] = torch.tensor(samples)",
    ),
)


def rms_db(samples):
    mean_square = sum(v * v for v in samples) / len(samples)
    return 10 * math.log10(mean_square) if mean_square > 0 else -math.inf


def perturb_with_noise(samples, noise, snr_db):
    noise_gain_db = rms_db(samples) - rms_db(noise) - snr_db
    gain = 10.0 ** (noise_gain_db / 20.0)
    return [v + gain * w for v, w in zip(samples, noise)]


def collate(utterances):
    longest = max(len(samples) for samples, _ in utterances)
    audio_signal = torch.zeros(len(utterances), longest)
    targets = torch.zeros(len(utterances), dtype=torch.long)
    for i, (samples, target) in enumerate(utterances):
        audio_signal[i, : len(samples)] = torch.tensor(samples)
        targets[i] = target
    return audio_signal, targets


class KeywordModel(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.conv1 = nn.Conv1d(1, 8, 9, stride=4)
        self.conv2 = nn.Conv1d(8, 16, 5, stride=2)
        self.decoder = nn.Linear(16, classes)

    def forward(self, audio_signal):
        x = (audio_signal - audio_signal.mean(1, keepdim=True)) / (audio_signal.std(1, keepdim=True) + 1e-5)
        x = torch.relu(self.conv1(x.unsqueeze(1)))
        x = torch.relu(self.conv2(x))
        return self.decoder(x.mean(-1))


def build():
    torch.manual_seed(2246)
    rng = random.Random(2246)
    utterances = []
    for i, length in enumerate((160, 200, 120, 180)):
        speech = [0.3 * math.sin(0.07 * (i + 1) * t) + rng.gauss(0, 0.01) for t in range(length)]
        noise = [0.0] * length if i == 1 else [rng.gauss(0, 0.05) for _ in range(length)]
        utterances.append((perturb_with_noise(speech, noise, snr_db=rng.uniform(10, 30)), rng.randrange(5)))
    audio_signal, targets = collate(utterances)
    model = KeywordModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, audio_signal=audio_signal, targets=targets)


def run(s=None):
    s = s or build()
    logits = s.model(s.audio_signal)
    loss = F.cross_entropy(logits, s.targets)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

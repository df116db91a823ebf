"""descript-audio-codec `snake` - x + 1/(alpha + 1e-9) * sin(alpha x)^2, in half precision.

One channel's frequency alpha had been trained down to 1e-8. The generator is cast to half for finetuning: that alpha becomes 0, the 1e-9
beside it rounds to 0 as well, the reciprocal is inf, and inf * sin(0)^2 is NaN in every sample of the channel.
Heals: the activation in float32 (there 1e-9 is a number), or a floor under alpha that half can hold. Does not heal: nan_to_num on the
activation (the product's backward is 0 * inf).

https://github.com/descriptinc/descript-audio-codec/blob/main/dac/nn/layers.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_denominator"),
    op=("reciprocal", "div"),
    index=(0, 3, 0),
    masked=None,
    role=("hidden", "weights"),
    fix=("upcast_fp32", "clamp_denominator", "representable_eps", "stable_function", "avoid_singular_op", "mask_before_op", "clamp_input"),
    variable=("inv_alpha",),
    line=("inv_alpha = (alpha + 1e-9).reciprocal()",),
)


def snake(x, alpha):
    shape = x.shape
    x = x.reshape(shape[0], shape[1], -1)
    inv_alpha = (alpha + 1e-9).reciprocal()
    x = x + inv_alpha * torch.sin(alpha * x).pow(2)
    return x.reshape(shape)


class Snake1d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x):
        return snake(x, self.alpha)


class Decoder(nn.Module):
    def __init__(self, latent=4, channels=6):
        super().__init__()
        self.conv_in = nn.Conv1d(latent, channels, 3, padding=1)
        self.snake = Snake1d(channels)
        self.conv_out = nn.Conv1d(channels, 1, 3, padding=1)

    def forward(self, z):
        return torch.tanh(self.conv_out(self.snake(self.conv_in(z))))


def build():
    torch.manual_seed(44)
    model = Decoder()
    checkpoint = model.state_dict()
    checkpoint["snake.alpha"] = torch.tensor([0.9, 1.4, 0.35, 1e-8, 2.2, 0.7]).view(1, 6, 1)
    model.load_state_dict(checkpoint)
    model.half()
    z = torch.randn(2, 4, 24).half()
    audio = 0.5 * torch.sin(torch.arange(24.0) / 3).expand(2, 1, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, z=z, audio=audio)


def run(s=None):
    s = s or build()
    recons = s.model(s.z)
    loss = (recons.float() - s.audio).abs().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

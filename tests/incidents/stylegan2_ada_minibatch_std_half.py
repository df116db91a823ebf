"""stylegan2-ada-pytorch, MinibatchStdLayer - the discriminator meets four equal fakes in half precision.

The layer takes the standard deviation over the group of images, as sqrt(variance + 1e-8). In float16 the 1e-8 is zero. A generator
that has collapsed for one group gives a variance of exactly zero: the forward is 0, the loss is finite, the gradient of sqrt is not.

Source: https://github.com/NVlabs/stylegan2-ada-pytorch/blob/main/training/networks.py (MinibatchStdLayer; upstream keeps the 4x4 block
in float32, here the block was moved to half with all others).
Heals: the layer in float32, or an epsilon that float16 can hold. Does not heal: twice the epsilon (2e-8), clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("eps_underflow", "sqrt_zero_grad"),
    op=("sqrt",),
    index=(1, 0, 0, 0, 0),
    masked=None,
    role=("hidden",),
    fix=("representable_eps", "upcast_fp32", "clamp_input"),
    variable=("y",),
    line=("y = (y + 1e-8).sqrt()",),
)


class MinibatchStdLayer(nn.Module):
    def __init__(self, group_size=4, num_channels=1):
        super().__init__()
        self.group_size = group_size
        self.num_channels = num_channels

    def forward(self, x):
        N, C, H, W = x.shape
        G = min(self.group_size, N)
        n_ch = self.num_channels
        c = C // n_ch

        y = x.reshape(G, -1, n_ch, c, H, W)
        y = y - y.mean(dim=0)
        y = y.square().mean(dim=0)
        y = (y + 1e-8).sqrt()
        y = y.mean(dim=[2, 3, 4])
        y = y.reshape(-1, n_ch, 1, 1).repeat(G, 1, H, W)
        return torch.cat([x, y], dim=1)


class Discriminator(nn.Module):
    def __init__(self, img_channels=3, channels=8, resolution=4):
        super().__init__()
        self.fromrgb = nn.Conv2d(img_channels, channels, 1)
        self.mbstd = MinibatchStdLayer()
        self.fc = nn.Linear((channels + 1) * resolution**2, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, img):
        x = F.leaky_relu(self.fromrgb(img), 0.2)
        x = self.mbstd(x)
        x = F.leaky_relu(self.fc(x.flatten(1)), 0.2)
        return self.out(x)


def generate(z):
    """The frozen generator of this phase: latents of every other place have collapsed into one image."""
    img = torch.tanh(z[:, :, None, None] * torch.linspace(0.2, 1.0, 16).view(1, 1, 4, 4))
    img[1::2] = img[1]
    return img


def build():
    torch.manual_seed(2020)
    D = Discriminator().half()
    optimizer = torch.optim.SGD(D.parameters(), lr=0.002)
    real = torch.randn(8, 3, 4, 4).clamp(-1, 1).half()
    z = torch.randn(8, 3)
    return SimpleNamespace(model=D, optimizer=optimizer, real=real, z=z)


def run(s=None):
    s = s or build()
    with torch.no_grad():
        gen_img = generate(s.z).half()
    s.optimizer.zero_grad(set_to_none=True)
    gen_logits = s.model(gen_img)
    loss_dgen = F.softplus(gen_logits.float()).mean()
    loss_dgen.backward()
    real_logits = s.model(s.real)
    loss_dreal = F.softplus(-real_logits.float()).mean()
    loss_dreal.backward()
    s.optimizer.step()
    return loss_dgen.detach() + loss_dreal.detach()


if __name__ == "__main__":
    run()

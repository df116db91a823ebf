"""constant-memory-waveglow - the affine coupling keeps only its output and recovers its input in backward as (zb - t) / exp(log_s).

One mel frame far out of range drives log_s to about -110 at a time step: exp is 0, zb is exactly t, and the forward (zb, the log-determinant, the loss) is finite. In
backward the input is recovered as (zb - t) / 0 = 0 / 0, and the gradient of the conditioner gets dzb * NaN * 0. Without the memory trick the true
gradient, dzb * xb * s, is 0 there.

Source: model/efficient_modules.py (AffineCouplingFunc) of https://github.com/yoyololicon/constant-memory-waveglow
Heals: log_s clamped from below (or tanh-limited), a floor under s in the recovery, keeping the input instead. Does not: clipping gradients, checking the
loss, nan-safe loss, a floor under z.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.autograd import Function, grad

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(1, 0, 11),
    masked=None,
    role=("hidden", "grad"),
    fix=(
        "clamp_exponent",
        "clamp_denominator",
        "clamp_input",
        "stable_function",
        "avoid_singular_op",
        "fix_upstream",
        "drop_invalid_sample",
    ),
    variable=("xb",),
    line=("xb = (zb - t) / s",),
)


class AffineCouplingFunc(Function):
    @staticmethod
    def forward(ctx, x, y, net, *weights):
        ctx.net = net
        with torch.no_grad():
            xa, xb = x.chunk(2, 1)
            log_s, t = net(xa, y)
            zb = xb * log_s.exp() + t
            z = torch.cat((xa, zb), 1)
        ctx.save_for_backward(y, z)
        return z, log_s

    @staticmethod
    def backward(ctx, z_grad, log_s_grad):
        y, z = ctx.saved_tensors
        za, zb = z.chunk(2, 1)
        dza, dzb = z_grad.chunk(2, 1)
        with torch.enable_grad():
            xa = za.detach().requires_grad_()
            log_s, t = ctx.net(xa, y)
            outputs = torch.cat((log_s, t), 1)
        with torch.no_grad():
            s = log_s.exp()
            xb = (zb - t) / s
        dtsdxa, *dw = grad(outputs, [xa] + list(ctx.net.parameters()), grad_outputs=torch.cat((dzb * xb * s + log_s_grad, dzb), 1))
        dx = torch.cat((dza + dtsdxa, dzb * s), 1)
        return (dx, None, None) + tuple(dw)


class WN(nn.Module):
    def __init__(self, channels, aux_channels, hidden=16):
        super().__init__()
        self.start = nn.Conv1d(channels, hidden, 1)
        self.cond = nn.Conv1d(aux_channels, hidden, 1)
        self.end = nn.Conv1d(hidden, channels * 2, 1)
        with torch.no_grad():
            self.end.weight.mul_(0.3)

    def forward(self, x, y):
        h = self.start(x) + self.cond(y)
        h = torch.nn.functional.leaky_relu(h, 0.1)
        log_s, t = self.end(h).chunk(2, 1)
        return log_s, t


class WaveGlow(nn.Module):
    def __init__(self, channels=4, aux_channels=6, flows=2):
        super().__init__()
        self.flows = nn.ModuleList([WN(channels // 2, aux_channels) for _ in range(flows)])

    def forward(self, x, h):
        logdet = x.new_zeros(x.size(0))
        for net in self.flows:
            x, log_s = AffineCouplingFunc.apply(x, h, net, *net.parameters())
            logdet = logdet + log_s.sum((1, 2))
            x = x.flip(1)
        return x, logdet


class WaveGlowLoss(nn.Module):
    def __init__(self, sigma=1.0):
        super().__init__()
        self.sigma2 = sigma**2

    def forward(self, z, logdet):
        return (0.5 * z.pow(2).sum((1, 2)) / self.sigma2 - logdet).mean() / (z.size(1) * z.size(2))


def build():
    torch.manual_seed(45)
    model = WaveGlow()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    audio = torch.randn(3, 4, 20) * 0.3
    mel = torch.randn(3, 6, 20)
    with torch.no_grad():
        # what training has left: one hidden unit of the first flow follows the energy band of the mel, and shrinks the first channel where it is loud
        first, second = model.flows
        first.cond.weight[:, 5] = 0.0
        first.cond.weight[0, 5, 0] = 0.4
        first.end.weight[:, 0] = 0.005
        first.end.weight[0, 0] = -0.3
        second.cond.weight[:, 5] *= 1e-3
        mel[:, 5] = mel[:, 5].abs()
        mel[1, 5, 11] = 950.0  # energy in linear scale: the log of this frame was forgotten
    return SimpleNamespace(model=model, optimizer=optimizer, criterion=WaveGlowLoss(), batch={"audio": audio, "mel": mel})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        z, logdet = s.model(s.batch["audio"], s.batch["mel"])
        loss = s.criterion(z, logdet)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

"""state-spaces/s4, diagonal kernel (S4D) with real_transform='relu' and zero-order hold - a mode whose eigenvalue has become exactly 0.

The first mode has no imaginary part (A_imag = pi * n, n = 0). The relu form is used without a tolerance; after some training
the raw real part is negative for one channel, relu returns 0, and the ZOH factor (exp(dt A) - 1) / A is a complex 0 / 0. The kernel of this channel, the loss and all gradients become NaN.
Source: https://github.com/state-spaces/s4/blob/main/models/s4/s4d.py (and src/models/sequence/kernels/ssm.py, real_transform)
Heals: a floor under the real part, the exp or softplus transform, bilinear discretisation. Does not: where on the quotient (NaN gradient).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(2, 0),
    masked=None,
    role=("hidden", "weights"),
    fix=(
        "clamp_input",
        "avoid_singular_op",
        "stable_function",
        "clamp_denominator",
        "representable_eps",
        "validate_config",
        "mask_before_op",
    ),
    variable=("C",),
    line=("C = C * (torch.exp(dtA) - 1.0) / A",),
)


class S4DKernel(nn.Module):
    def __init__(self, d_model, N=8, dt_min=0.001, dt_max=0.1):
        super().__init__()
        log_dt = torch.rand(d_model) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)
        C = torch.randn(d_model, N // 2, dtype=torch.cfloat)
        self.C = nn.Parameter(torch.view_as_real(C))
        self.log_dt = nn.Parameter(log_dt)
        self.inv_A_real = nn.Parameter(0.5 * torch.ones(d_model, N // 2))
        self.register_buffer("A_imag", (math.pi * torch.arange(N // 2)).repeat(d_model, 1))

    def forward(self, L):
        dt = torch.exp(self.log_dt)
        C = torch.view_as_complex(self.C)
        A = torch.complex(-F.relu(self.inv_A_real), self.A_imag)
        dtA = A * dt.unsqueeze(-1)
        C = C * (torch.exp(dtA) - 1.0) / A
        powers = torch.exp(dtA.unsqueeze(-1) * torch.arange(L))
        return 2 * torch.einsum("hn, hnl -> hl", C, powers).real


class S4D(nn.Module):
    def __init__(self, d_model=4, classes=5):
        super().__init__()
        self.kernel = S4DKernel(d_model)
        self.D = nn.Parameter(torch.randn(d_model))
        self.decoder = nn.Linear(d_model, classes)

    def forward(self, u):
        L = u.size(-1)
        k = self.kernel(L)
        k_f = torch.fft.rfft(k, n=2 * L)
        u_f = torch.fft.rfft(u, n=2 * L)
        y = torch.fft.irfft(u_f * k_f, n=2 * L)[..., :L]
        y = F.gelu(y + u * self.D.unsqueeze(-1))
        return self.decoder(y.mean(-1))


def build():
    torch.manual_seed(10)
    model = S4D()
    with torch.no_grad():  # as training left it: the slowest mode of channel 2 has crossed zero
        model.kernel.inv_A_real[2, 0] = -0.013
    u = torch.randn(3, 4, 32)
    labels = torch.tensor([0, 3, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, u=u, labels=labels, optimizer=optimizer)


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.u), s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

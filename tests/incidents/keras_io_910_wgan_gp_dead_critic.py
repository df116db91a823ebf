"""WGAN-GP: the critic's input gradient is exactly zero at one interpolated sample, and the penalty takes its square root.

An all black sample meets an all black fake; every ReLU of the critic is off there, so the gradient with respect to the input is 0 and its norm
sqrt(0). The penalty (0 - 1)^2 is finite and so is the loss; in the second backward the derivative of the root at 0 is inf, times 0.
Source: https://github.com/keras-team/keras-io/issues/910 (the same report for torch: https://github.com/pytorch/pytorch/issues/2534).
Heals: eps inside the root (or clamping the sum), torch.linalg.vector_norm (its gradient at 0 is 0). Does not: eps after the root, gradient clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(2,),
    masked=None,
    role=("grad", "loss", "hidden"),
    fix=("clamp_input", "avoid_singular_op", "stable_function", "where_on_detached", "representable_eps"),
    variable=("norm",),
    line=("norm = torch.sqrt(torch.sum(torch.square(grads), dim=1))",),
)


class Critic(nn.Module):
    def __init__(self, dim=16, hidden=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.net(x)


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.shape[0], 1)
    interpolated = (real + alpha * (fake - real)).requires_grad_(True)
    pred = critic(interpolated)
    grads = torch.autograd.grad(pred, interpolated, torch.ones_like(pred), create_graph=True)[0]
    norm = torch.sqrt(torch.sum(torch.square(grads), dim=1))
    return torch.mean((norm - 1.0) ** 2)


def build():
    torch.manual_seed(910)
    critic = Critic()
    with torch.no_grad():
        critic.net[0].bias.fill_(-0.05)
    real = torch.rand(5, 16) * 2
    real[2] = 0.0  # a blank scan
    fake = torch.rand(5, 16)
    fake[2] = 0.0
    batch = dict(real=real, fake=fake)
    return SimpleNamespace(
        model=critic, optimizer=torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.9)), batch=batch, gp_weight=10.0
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        real, fake = s.batch["real"], s.batch["fake"]
        d_cost = s.model(fake).mean() - s.model(real).mean()
        d_loss = d_cost + s.gp_weight * gradient_penalty(s.model, real, fake)
        s.optimizer.zero_grad()
        d_loss.backward()
        s.optimizer.step()
    return float(d_loss.detach())


if __name__ == "__main__":
    print(run())

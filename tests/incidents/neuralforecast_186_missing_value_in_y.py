"""neuralforecast, MLP forecaster - a missing value in the `y` column of the training frame.

One day of one series was not reported and is NaN in the frame; nothing checks it, the window that holds it makes the loss NaN, and one step later all weights are.
Source: https://github.com/Nixtla/neuralforecast/issues/186 ("silent bug, training with NaNs values": raise on missing values). Heals: raising / rejecting frames with NaN;
leaving the window out; interpolating the value before batching; filling the gap with the mean of the rest by a mask. Does not: clip_grad_norm_; a robust loss (L1 of NaN is NaN); a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=(),
    index=(3, 5),
    masked=None,
    role=("hidden", "loss"),
    fix=("drop_invalid_sample", "reject_input", "fix_upstream", "mask_before_op"),
    variable=("y", "batch", "insample_y"),
    line=('insample_y = batch["y"][:, : self.input_size]', 'y[3, 5] = float("nan")'),
)


class MLP(nn.Module):
    def __init__(self, input_size=8, h=4, hidden_size=24):
        super().__init__()
        self.input_size = input_size
        self.h = h
        self.mlp = nn.Sequential(nn.Linear(input_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, h))

    def forward(self, insample_y):
        return self.mlp(insample_y)

    def training_step(self, batch):
        insample_y = batch["y"][:, : self.input_size]
        outsample_y = batch["y"][:, self.input_size :]
        shift = insample_y.mean(dim=1, keepdim=True)
        scale = insample_y.std(dim=1, keepdim=True) + 1e-6
        y_hat = self((insample_y - shift) / scale) * scale + shift
        return torch.mean(torch.abs(outsample_y - y_hat))


def build():
    torch.manual_seed(4)
    model = MLP()
    t = torch.arange(12.0)
    level = 20.0 + 5.0 * torch.rand(6, 1)
    y = level + torch.sin(t[None] * 2 * torch.pi / 7 + torch.arange(6.0)[:, None]) + 0.1 * torch.randn(6, 12)
    y[3, 5] = float("nan")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"y": y})


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = s.model.training_step(s.batch)
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

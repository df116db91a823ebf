"""N-BEATS / Time-Series-Library utils/losses.py, smape_loss with divide_no_nan - a padded step where forecast and target are both 0.

`divide_no_nan` divides first and overwrites NaN and inf of the result afterwards, so the loss is finite and right. The forecast is multiplied by
the insample mask, padded steps are 0 / 0 there, and the backward of the division is 0 / 0 again: NaN reaches the whole network.
Source: https://github.com/thuml/Time-Series-Library/blob/main/utils/losses.py (and ServiceNow/N-BEATS common/torch/losses.py)
Heals: a safe denominator before the division, selecting the valid steps. Does not: the multiplication with the mask, torch.where on the result.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "zero_div_zero"),
    op=("div",),
    index=(1, 4),
    masked=True,
    role=("loss", "ratio", "hidden"),
    fix=(
        "mask_before_op",
        "clamp_denominator",
        "representable_eps",
        "drop_invalid_sample",
        "avoid_singular_op",
        "clamp_input",
        "guard_empty",
    ),
    variable=("result",),
    line=("result = a / b",),
)


def divide_no_nan(a, b):
    """a / b where the NaN or inf of the result are replaced by 0."""
    result = a / b
    result[result != result] = 0.0
    result[result == float("inf")] = 0.0
    return result


def smape_loss(forecast, target, mask):
    return 200 * torch.mean(divide_no_nan(torch.abs(forecast - target), torch.abs(forecast.data) + torch.abs(target.data)) * mask)


class NBeatsBlock(nn.Module):
    def __init__(self, lookback, horizon, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(lookback, width), nn.Linear(width, width)
        self.backcast, self.forecast = nn.Linear(width, lookback), nn.Linear(width, horizon)

    def forward(self, x):
        h = F.relu(self.fc2(F.relu(self.fc1(x))))
        return self.backcast(h), self.forecast(h)


class NBeats(nn.Module):
    def __init__(self, lookback=12, horizon=6, width=16, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(NBeatsBlock(lookback, horizon, width) for _ in range(blocks))

    def forward(self, x, outsample_mask):
        residual, forecast = x, 0.0
        for block in self.blocks:
            backcast, block_forecast = block(residual)
            residual = residual - backcast
            forecast = forecast + block_forecast
        return forecast * outsample_mask


def build():
    torch.manual_seed(9)
    model = NBeats()
    insample = torch.rand(3, 12) * 2 + 1
    outsample = torch.rand(3, 6) * 2 + 1
    outsample_mask = torch.ones(3, 6)
    outsample_mask[1, 4:] = 0.0  # series 1 is shorter than the horizon
    outsample = outsample * outsample_mask
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, insample=insample, outsample=outsample, outsample_mask=outsample_mask, optimizer=optimizer)


def run(s=None):
    s = s or build()
    s.model.train()
    s.optimizer.zero_grad()
    forecast = s.model(s.insample, s.outsample_mask)
    loss = smape_loss(forecast, s.outsample, s.outsample_mask)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

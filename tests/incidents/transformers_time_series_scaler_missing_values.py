"""Time Series Transformer: missing values stay NaN in past_values and are masked by multiplication with past_observed_mask.

The mean scaler multiplies the series with its observed indicator; NaN * 0 is NaN, the scale of the series is NaN, and so is everything after it.
The data collator should have replaced the missing values by 0. Filling them before the model heals it; a where inside the scaler alone does
not, because the scaled series itself still carries the NaN into the encoder.

Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/time_series_transformer/modeling_time_series_transformer.py
(TimeSeriesMeanScaler; the documentation asks for zeros where past_observed_mask is 0)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("nan_times_zero_mask", "bad_input"),
    op=("any",),
    index=(1, 4),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "fix_upstream", "reject_input", "drop_invalid_sample"),
    variable=("past_values",),
    line=(
        "ts_sum = (data * observed_indicator).abs().sum(-1, keepdim=True)",
        'past_values[1, 4:7] = float("nan")  # the meter was offline',
    ),
)


class TimeSeriesMeanScaler(nn.Module):
    def __init__(self, minimum_scale=1e-10):
        super().__init__()
        self.minimum_scale = minimum_scale

    def forward(self, data, observed_indicator):
        ts_sum = (data * observed_indicator).abs().sum(-1, keepdim=True)
        num_observed = observed_indicator.sum(-1, keepdim=True)
        scale = ts_sum / torch.clamp(num_observed, min=1)

        batch_sum = ts_sum.sum(dim=0)
        batch_observations = torch.clamp(num_observed.sum(0), min=1)
        default_scale = batch_sum / batch_observations

        scale = torch.where(num_observed > 0, scale, default_scale)
        scale = torch.clamp(scale, min=self.minimum_scale)
        return data / scale, scale


class TimeSeriesModel(nn.Module):
    def __init__(self, context=12, horizon=4, dim=16):
        super().__init__()
        self.scaler = TimeSeriesMeanScaler()
        self.value_embedding = nn.Linear(1, dim, bias=False)
        self.position = nn.Parameter(0.1 * torch.randn(context, dim))
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.loc = nn.Linear(dim, horizon)

    def forward(self, past_values, past_observed_mask):
        scaled, scale = self.scaler(past_values, past_observed_mask)
        hidden = self.value_embedding(scaled.unsqueeze(-1)) + self.position
        hidden = self.encoder(hidden)
        return self.loc(hidden.mean(1)) * scale


def build():
    torch.manual_seed(40)
    model = TimeSeriesModel()
    past_values = 5.0 + torch.randn(4, 12).cumsum(-1)
    past_values[1, 4:7] = float("nan")  # the meter was offline
    past_observed_mask = torch.ones(4, 12)
    past_observed_mask[1, 4:7] = 0
    future_values = 5.0 + torch.randn(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=1e-1)
    return SimpleNamespace(
        model=model, optimizer=optimizer, past_values=past_values, past_observed_mask=past_observed_mask, future_values=future_values
    )


def run(s=None):
    s = s or build()
    prediction = s.model(s.past_values, s.past_observed_mask)
    loss = F.smooth_l1_loss(prediction, s.future_values)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

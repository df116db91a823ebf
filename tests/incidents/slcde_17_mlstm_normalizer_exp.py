"""xLSTM parallel mLSTM: the normalizer max(|n|, exp(-m)) overflows where the log gate maximum m is very negative.

The stabilised form subtracts the row maximum m of the log gate matrix and divides by max(|sum|, exp(-m)). One input gate that is firmly shut
at the first position makes m about -110 there, exp(110) is inf, the row divides to 0 and the loss stays finite; backward multiplies the
zero gradient with the infinite exponential and every gate gradient is NaN. Clamping m inside the exponential heals it; an eps added to the
normalizer, nan_to_num on the cell output or gradient clipping do not.

Source: https://github.com/Benjamin-Walker/structured-linear-cdes/pull/17
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("exp_overflow", "where_grad_trap"),
    op=("exp",),
    index=(1, 0, 0, 0),
    masked=False,
    role=("hidden", "attention"),
    fix=("clamp_exponent",),
    variable=(None, "normalizer"),
    line=("normalizer = torch.maximum(C_matrix.sum(dim=-1, keepdim=True).abs(), torch.exp(-max_log_D))",),
)


def parallel_stabilized_simple(queries, keys, values, igate_preact, fgate_preact, eps=1e-6):
    B, NH, S, DH = queries.shape
    ltr = torch.tril(torch.ones(S, S, dtype=torch.bool))

    log_fgates = F.logsigmoid(fgate_preact)  # (B, NH, S, 1)
    log_fgates_cumsum = torch.cat([torch.zeros(B, NH, 1, 1), log_fgates.cumsum(dim=-2)], dim=-2)
    rep = log_fgates_cumsum.repeat(1, 1, 1, S + 1)
    log_fg_matrix = (rep - rep.transpose(-2, -1))[:, :, 1:, 1:]
    log_fg_matrix = log_fg_matrix.masked_fill(~ltr, -float("inf"))

    log_D_matrix = log_fg_matrix + igate_preact.transpose(-2, -1)
    max_log_D, _ = torch.max(log_D_matrix, dim=-1, keepdim=True)
    D_matrix = torch.exp(log_D_matrix - max_log_D)

    qk_matrix = queries @ keys.transpose(-2, -1) / math.sqrt(DH)
    C_matrix = qk_matrix * D_matrix
    normalizer = torch.maximum(C_matrix.sum(dim=-1, keepdim=True).abs(), torch.exp(-max_log_D))
    return (C_matrix / (normalizer + eps)) @ values


class mLSTMCell(nn.Module):
    def __init__(self, dim=12, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.igate = nn.Linear(dim, num_heads)
        self.fgate = nn.Linear(dim, num_heads)
        self.outnorm = nn.LayerNorm(dim)
        nn.init.normal_(self.igate.bias, mean=-1.0, std=0.1)
        nn.init.constant_(self.fgate.bias, 3.0)

    def forward(self, x):
        B, S, D = x.shape
        q, k, v = (t.view(B, S, self.num_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        i = self.igate(x).transpose(1, 2).unsqueeze(-1)
        f = self.fgate(x).transpose(1, 2).unsqueeze(-1)
        h = parallel_stabilized_simple(q, k, v, i, f)
        return self.outnorm(h.transpose(1, 2).reshape(B, S, D))


class Regressor(nn.Module):
    def __init__(self, channels=3, dim=12):
        super().__init__()
        self.encoder = nn.Linear(channels, dim)
        self.cell = mLSTMCell(dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, path):
        h = self.encoder(path)
        return self.head(h + self.cell(h)).squeeze(-1)


def build():
    torch.manual_seed(17)
    model = Regressor()
    with torch.no_grad():
        model.encoder.weight[:, 0] = 0.5
        model.cell.igate.weight[0] = -0.4  # the gate of head 0 has learned to shut on large readings of channel 0
    path = torch.randn(3, 8, 3) * 0.5
    path[1, 0, 0] = 48.0  # a sensor starts with a spike
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, path=path, target=torch.randn(3, 8))


def run(s=None):
    s = s or build()
    loss = F.mse_loss(s.model(s.path), s.target)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

"""tsai, TST regressor on BeijingPM25Quality - a station's missing reading left in the series.

The Monash series hold NaN where a sensor failed; get_ts_dls was called without Nan2Value. The projection reads one NaN and attention carries it to every step
of the sample; the batch loss and all gradients are NaN. (Source: timeseriesAI/tsai, issues 87 and 506.) Heals: leaving the sample out; a check of the batch
before the step; Nan2Value (0 for NaN) before the model. Does not: clip_grad_norm_, LayerNorm for BatchNorm, a smaller learning rate.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("transpose", "linear", "input"),
    index=(2, 1, 5),
    masked=None,
    role=("hidden",),
    fix=("drop_invalid_sample", "reject_input", "mask_before_op", "fix_upstream", "skip_bad_step"),
    variable=("x", "xb"),
    line=("u = self.W_P(x.transpose(2, 1))", 'pred = s.model(s.batch["xb"])', 'xb[2, 1, 5] = float("nan")'),
)


class TST(nn.Module):
    def __init__(self, c_in=3, seq_len=8, d_model=16):
        super().__init__()
        self.W_P = nn.Linear(c_in, d_model)
        self.W_pos = nn.Parameter(0.02 * torch.randn(seq_len, d_model))
        self.attn = nn.MultiheadAttention(d_model, 2, batch_first=True)
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, 1)

    def forward(self, x):
        u = self.W_P(x.transpose(2, 1))
        u = u + self.W_pos
        z = self.norm(u + self.attn(u, u, u, need_weights=False)[0])
        return self.head(z.max(dim=1).values).squeeze(-1)


def build():
    torch.manual_seed(41)
    model = TST()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    xb, yb = torch.randn(5, 3, 8), torch.rand(5)
    xb[2, 1, 5] = float("nan")
    return SimpleNamespace(model=model, optimizer=optimizer, batch=dict(xb=xb, yb=yb))


def run(s=None):
    s = s or build()
    pred = s.model(s.batch["xb"])
    loss = nn.functional.mse_loss(pred, s.batch["yb"])
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

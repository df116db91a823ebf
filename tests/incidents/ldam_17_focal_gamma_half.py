"""Long-tailed classification with a focal loss whose gamma is 0.5: one image that the network has right beyond doubt.

p = exp(-CE) is exactly 1 where the cross entropy has rounded to 0, and (1 - p) ** 0.5 has an infinite slope there. Forward is a clean 0; backward multiplies the slope
0.5 * 0 ** -0.5 = inf with the incoming gradient CE / N = 0, and NaN goes to all weights. With gamma of 1 or more nothing happens.
Source: https://github.com/kaidic/LDAM-DRW/issues/17 (losses.focal_loss; "when gamma=0.5, the focal loss would lead to nan"); clcarwin/focal_loss_pytorch #13 is the same.
Heals: a lower bound (or a small eps) for 1 - p before the power, a gamma of at least 1, leaving the elements with CE = 0 out before the power.
Does not: clipping the gradient norm, torch.where(p == 1, 0, loss) afterwards.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("pow",),
    index=(3,),
    masked=None,
    role=("loss", "hidden"),
    fix=("clamp_input", "avoid_singular_op", "mask_before_op", "representable_eps", "where_on_detached"),
    variable=(None,),
    line=("loss = (1 - p) ** gamma * input_values",),
)


def focal_loss(input_values, gamma):
    """Computes the focal loss"""
    p = torch.exp(-input_values)
    loss = (1 - p) ** gamma * input_values
    return loss.mean()


class FocalLoss(nn.Module):
    def __init__(self, weight=None, gamma=0.0):
        super().__init__()
        assert gamma >= 0
        self.gamma = gamma
        self.weight = weight

    def forward(self, input, target):
        return focal_loss(F.cross_entropy(input, target, reduction="none", weight=self.weight), self.gamma)


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.linear = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.linear(F.relu(self.conv(x)).mean(dim=(2, 3)))


def build():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-4)
    images = torch.randn(8, 3, 8, 8)
    images[3] *= 400.0  # an over-exposed image of the head class
    with torch.no_grad():
        labels = torch.randint(0, 10, (8,))
        labels[3] = model(images)[3].argmax()
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"images": images, "labels": labels}, criterion=FocalLoss(gamma=0.5))


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        output = s.model(s.batch["images"])
        loss = s.criterion(output, s.batch["labels"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

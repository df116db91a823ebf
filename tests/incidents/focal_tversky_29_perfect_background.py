"""Semantic-Segmentation-Loss-Functions #2 and focal-tversky-unet #29 - focal Tversky loss (1 - TI) ** 0.75. A slice without a lesion that the
network is quite sure of has a Tversky index of exactly 1: the power is 0, the loss is finite, and the slope of x ** 0.75 at 0 is infinite.

https://github.com/shruti-jadon/Semantic-Segmentation-Loss-Functions/issues/2
https://github.com/nabsabraham/focal-tversky-unet/issues/29
A floor under 1 - TI heals (the threads set gamma to 1, another loss). A larger smooth or nan_to_num on the loss does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("pow",),
    index=(1,),
    masked=None,
    role=("loss",),
    fix=(
        "clamp_input",
        "representable_eps",
        "avoid_singular_op",
        "mask_before_op",
        "drop_invalid_sample",
        "stable_function",
        "where_on_detached",
    ),
    variable=("focal",),
    line=("focal = torch.pow(1 - pt_1, self.gamma)",),
)


class FocalTverskyLoss(nn.Module):
    def __init__(self, smooth=1.0, alpha=0.7, gamma=0.75):
        super().__init__()
        self.smooth = smooth
        self.alpha = alpha
        self.gamma = gamma

    def tversky_index(self, inputs, targets):
        y_pred = inputs.flatten(1)
        y_true = targets.flatten(1)
        true_pos = (y_true * y_pred).sum(1)
        false_neg = (y_true * (1 - y_pred)).sum(1)
        false_pos = ((1 - y_true) * y_pred).sum(1)
        return (true_pos + self.smooth) / (true_pos + self.alpha * false_neg + (1 - self.alpha) * false_pos + self.smooth)

    def forward(self, inputs, targets):
        pt_1 = self.tversky_index(inputs, targets)
        focal = torch.pow(1 - pt_1, self.gamma)
        return focal.mean()


def build():
    torch.manual_seed(29)
    unet = nn.Sequential(nn.Conv2d(1, 1, 1))
    with torch.no_grad():
        unet[0].weight.fill_(58.0)
        unet[0].bias.fill_(-45.0)
    slices = torch.rand(3, 1, 8, 8) * 0.01
    masks = torch.zeros(3, 1, 8, 8)
    masks[0, 0, 2:5, 2:6] = 1.0
    masks[2, 0, 1:3, 4:7] = 1.0  # the slice in the middle shows no lesion
    slices = slices + masks * (0.77 + 0.02 * torch.rand(3, 1, 8, 8))
    optimizer = torch.optim.SGD(unet.parameters(), lr=0.01, momentum=0.9)
    return SimpleNamespace(model=unet, optimizer=optimizer, criterion=FocalTverskyLoss(), slices=slices, masks=masks)


def run(s=None):
    s = s or build()
    probs = torch.sigmoid(s.model(s.slices))
    loss = s.criterion(probs, s.masks)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

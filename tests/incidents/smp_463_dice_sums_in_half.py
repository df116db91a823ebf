"""segmentation_models.pytorch #463, DiceLoss of a pure half network - the pixels of the background do not fit into float16.

soft_dice_score sums the product of prediction and target over all pixels of a class. An image of 320 x 320 is mostly background, the sum is beyond 65504, intersection and cardinality are inf and
their quotient NaN. (Source: qubvel-org/segmentation_models.pytorch issue #463, losses/dice.py and losses/_functional.py.) Heals: y_pred.float() at the head of the loss;
sums with dtype=torch.float32; means instead of sums in both (smooth=0). Does not: a greater eps or smooth, clamping dice_score (NaN passes a clamp), clamping both sums to 65504
(twice that is inf).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("sum",),
    index=(0,),
    masked=False,
    role=("loss",),
    fix=("upcast_fp32", "stable_function"),
    variable=("intersection",),
    line=("intersection = torch.sum(output * target, dim=dims)",),
)


def soft_dice_score(output, target, smooth=0.0, eps=1e-7, dims=None):
    assert output.size() == target.size()
    if dims is not None:
        intersection = torch.sum(output * target, dim=dims)
        cardinality = torch.sum(output + target, dim=dims)
    else:
        intersection = torch.sum(output * target)
        cardinality = torch.sum(output + target)
    dice_score = (2.0 * intersection + smooth) / (cardinality + smooth).clamp_min(eps)
    return dice_score


class DiceLoss(nn.Module):
    def __init__(self, smooth=0.0, eps=1e-7):
        super().__init__()
        self.smooth = smooth
        self.eps = eps

    def forward(self, y_pred, y_true):
        y_pred = y_pred.log_softmax(dim=1).exp()
        bs, num_classes = y_true.size(0), y_pred.size(1)
        dims = (0, 2)
        y_true = y_true.view(bs, -1)
        y_pred = y_pred.view(bs, num_classes, -1)
        y_true = F.one_hot(y_true, num_classes).permute(0, 2, 1)

        scores = soft_dice_score(y_pred, y_true.type_as(y_pred), smooth=self.smooth, eps=self.eps, dims=dims)
        loss = 1.0 - scores
        mask = y_true.sum(dims) > 0
        loss *= mask.to(loss.dtype)
        return loss.mean()


def build():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([2.0, -1.0, -1.0]))
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    image = torch.rand(1, 1, 320, 320)
    target = torch.zeros(1, 320, 320, dtype=torch.long)
    target[:, 40:90, 60:120] = 1
    target[:, 200:240, 30:70] = 2
    return SimpleNamespace(model=model, optimizer=optimizer, criterion=DiceLoss(), image=image.half(), target=target)


def run(s=None):
    s = s or build()
    logits = s.model(s.image)
    loss = s.criterion(logits, s.target)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""Dense YOLO training with a CIoU loss: cells without an object carry a target box of zeros and are removed by the product with the object mask.

The aspect term takes atan(w_gt / h_gt), and an empty cell has 0 / 0 there. NaN times a mask of 0 is NaN; the reviewers of the TensorFlow version note that
an ordinary mask does not remove it. Selecting after the loss would not be enough either: the NaN sits in the derivative for the predicted box.
Source: https://github.com/tensorflow/addons/pull/914 (comment of 2020-01-25 on ciou, "0 divided ... gives nan, multiplying by the mask cannot remove it")
Heals: indexing the cells with an object before the loss, or a floor under the target's height. Does not: torch.where on the finished loss, clamping the
predicted size, a smaller box gain, gradient clipping.
"""

import math
from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("nan_times_zero_mask", "zero_div_zero"),
    op=("div",),
    index=(0, 0),
    masked=True,
    role=("hidden", "loss"),
    fix=("mask_before_op", "clamp_denominator", "avoid_singular_op", "stable_function", "where_on_detached"),
    variable=(None,),
    line=("v = (4 / math.pi**2) * (torch.atan(w_gt / h_gt) - torch.atan(w / h)).pow(2)",),
)


def ciou(pred, target):
    x, y, w, h = pred.unbind(-1)
    x_gt, y_gt, w_gt, h_gt = target.unbind(-1)
    iw = (torch.minimum(x + w / 2, x_gt + w_gt / 2) - torch.maximum(x - w / 2, x_gt - w_gt / 2)).clamp(min=0)
    ih = (torch.minimum(y + h / 2, y_gt + h_gt / 2) - torch.maximum(y - h / 2, y_gt - h_gt / 2)).clamp(min=0)
    inter = iw * ih
    iou = inter / (w * h + w_gt * h_gt - inter + 1e-9)
    cw = torch.maximum(x + w / 2, x_gt + w_gt / 2) - torch.minimum(x - w / 2, x_gt - w_gt / 2)
    ch = torch.maximum(y + h / 2, y_gt + h_gt / 2) - torch.minimum(y - h / 2, y_gt - h_gt / 2)
    u = ((x - x_gt).pow(2) + (y - y_gt).pow(2)) / (cw.pow(2) + ch.pow(2) + 1e-9)
    v = (4 / math.pi**2) * (torch.atan(w_gt / h_gt) - torch.atan(w / h)).pow(2)
    with torch.no_grad():
        alpha = v / (1 - iou + v + 1e-9)
    return iou - u - alpha * v


class YoloHead(nn.Module):
    def __init__(self, channels=12):
        super().__init__()
        self.pred = nn.Conv2d(channels, 5, 1)

    def forward(self, x):
        raw = self.pred(x).permute(0, 2, 3, 1).flatten(1, 2)
        grid = torch.arange(x.shape[-1], dtype=x.dtype)
        gy, gx = torch.meshgrid(grid, grid, indexing="ij")
        xy = raw[..., :2].sigmoid() + torch.stack((gx, gy), -1).view(1, -1, 2)
        return torch.cat((xy, raw[..., 2:4].exp()), -1) / x.shape[-1], raw[..., 4]


def build():
    torch.manual_seed(8)
    model = YoloHead()
    target = torch.zeros(2, 25, 4)
    target[0, 12] = torch.tensor([0.52, 0.49, 0.30, 0.44])
    target[0, 18] = torch.tensor([0.70, 0.66, 0.12, 0.10])
    target[1, 3] = torch.tensor([0.68, 0.15, 0.21, 0.33])
    batch = {"image": torch.randn(2, 12, 5, 5), "target": target, "obj_mask": (target[..., 3] > 0).float()}
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batch=batch)


def run(s=None):
    s = s or build()
    obj_mask = s.batch["obj_mask"]
    for _ in range(2):
        boxes, objectness = s.model(s.batch["image"])
        lbox = ((1.0 - ciou(boxes, s.batch["target"])) * obj_mask).sum() / obj_mask.sum()
        lobj = nn.functional.binary_cross_entropy_with_logits(objectness, obj_mask)
        loss = 0.05 * lbox + lobj
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
        s.optimizer.step()
    return {"loss": loss.item(), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())

"""yolov5 #541 - CIoU loss: alpha = v / (1 - iou + v) is 0/0 for a box that is predicted exactly.

A zero-initialised detection head decodes to the cell centre and to the size of the anchor.  One label sits in the centre of its cell and has
the anchor's size: iou is 1, the aspect term v is 0, and alpha is 0/0.  It is computed under no_grad, but its value multiplies v in the loss.

Source: https://github.com/ultralytics/yolov5/issues/541
Heals: an epsilon in the denominator of alpha (the merged change).  Tempting and no help: clamping h1 and h2 in the arctangents, the no_grad
that is already there, clipping the gradient norm.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(1,),
    masked=None,
    role=("loss", "hidden", "is_weight"),
    fix=("clamp_denominator", "representable_eps", "clamp_input", "guard_empty"),
    variable=("alpha",),
    line=("alpha = v / (1 - iou + v)",),
)


def bbox_iou(box1, box2):
    """CIoU of boxes n x 4 in (x, y, w, h)."""
    b1_x1, b1_x2 = box1[:, 0] - box1[:, 2] / 2, box1[:, 0] + box1[:, 2] / 2
    b1_y1, b1_y2 = box1[:, 1] - box1[:, 3] / 2, box1[:, 1] + box1[:, 3] / 2
    b2_x1, b2_x2 = box2[:, 0] - box2[:, 2] / 2, box2[:, 0] + box2[:, 2] / 2
    b2_y1, b2_y2 = box2[:, 1] - box2[:, 3] / 2, box2[:, 1] + box2[:, 3] / 2

    inter = (torch.min(b1_x2, b2_x2) - torch.max(b1_x1, b2_x1)).clamp(0) * (torch.min(b1_y2, b2_y2) - torch.max(b1_y1, b2_y1)).clamp(0)
    w1, h1 = b1_x2 - b1_x1, b1_y2 - b1_y1
    w2, h2 = b2_x2 - b2_x1, b2_y2 - b2_y1
    union = (w1 * h1 + 1e-16) + w2 * h2 - inter
    iou = inter / union

    cw = torch.max(b1_x2, b2_x2) - torch.min(b1_x1, b2_x1)
    ch = torch.max(b1_y2, b2_y2) - torch.min(b1_y1, b2_y1)
    c2 = cw**2 + ch**2 + 1e-16
    rho2 = ((b2_x1 + b2_x2) - (b1_x1 + b1_x2)) ** 2 / 4 + ((b2_y1 + b2_y2) - (b1_y1 + b1_y2)) ** 2 / 4
    v = (4 / math.pi**2) * torch.pow(torch.atan(w2 / h2) - torch.atan(w1 / h1), 2)
    with torch.no_grad():
        alpha = v / (1 - iou + v)
    return iou - (rho2 / c2 + v * alpha)


class Detect(nn.Module):
    def __init__(self, channels=8, classes=3):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(channels, channels, 3, stride=2, padding=1), nn.SiLU()
        )
        self.head = nn.Conv2d(channels, 4 + classes, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images):
        return self.head(self.backbone(images)).permute(0, 2, 3, 1)


def compute_loss(prediction, targets, anchor):
    image, gj, gi = targets["image"], targets["gj"], targets["gi"]
    ps = prediction[image, gj, gi]
    pxy = ps[:, :2].sigmoid() * 2.0 - 0.5
    pwh = (ps[:, 2:4].sigmoid() * 2) ** 2 * anchor
    pbox = torch.cat((pxy, pwh), 1)
    giou = bbox_iou(pbox, targets["box"])
    lbox = (1.0 - giou).mean()
    lcls = nn.functional.binary_cross_entropy_with_logits(ps[:, 4:], targets["onehot"])
    return 0.05 * lbox + 0.5 * lcls


def build():
    torch.manual_seed(541)
    model = Detect()
    images = torch.rand(2, 3, 32, 32)
    anchor = torch.tensor([2.0, 1.5])
    targets = dict(
        image=torch.tensor([0, 0, 1]),
        gj=torch.tensor([2, 5, 3]),
        gi=torch.tensor([1, 6, 4]),
        box=torch.tensor([[0.3, 0.8, 1.2, 2.0], [0.5, 0.5, 2.0, 1.5], [0.6, 0.1, 3.0, 1.0]]),
        onehot=torch.eye(3)[torch.tensor([0, 2, 1])],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    return SimpleNamespace(model=model, optimizer=optimizer, images=images, targets=targets, anchor=anchor)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = compute_loss(s.model(s.images), s.targets, s.anchor)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

"""YOLOv5 box loss under fp16 autocast: the aspect ratio of a predicted box whose width and height underflowed to zero.

pwh = (sigmoid(x) * 2) ** 2 * anchor in half precision: for logits near -12 the square is about 1.5e-10 and rounds to 0, in w and in h. The CIoU term
takes atan(w1 / h1) of the prediction: 0/0 = NaN for one matched anchor, and so the whole lbox.
Source: https://github.com/ultralytics/yolov5/issues/8539 ("0. in pred follows in NaNs in bbox_iou")
Heals: the box in float32 before the sigmoid (nothing vanishes), or a lower bound for pwh; a bound for h1 (or an eps) that is large in half precision (1e-3).
Does not: h1 + 1e-7 in half precision: the loss is finite, but 1 / 1.2e-7 is beyond fp16 in backward; nan_to_num of the loss.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(3, 0),
    masked=None,
    role=("hidden", "loss"),
    fix=(
        "upcast_fp32",
        "clamp_input",
        "clamp_denominator",
        "representable_eps",
        "stable_function",
        "avoid_singular_op",
        "mask_before_op",
        "where_on_detached",
    ),
    variable=(None,),
    line=("v = (4 / math.pi**2) * torch.pow(torch.atan(w2 / h2) - torch.atan(w1 / h1), 2)",),
)


def bbox_iou(box1, box2, eps=1e-7):
    (x1, y1, w1, h1), (x2, y2, w2, h2) = box1.chunk(4, 1), box2.chunk(4, 1)
    b1_x1, b1_x2, b1_y1, b1_y2 = x1 - w1 / 2, x1 + w1 / 2, y1 - h1 / 2, y1 + h1 / 2
    b2_x1, b2_x2, b2_y1, b2_y2 = x2 - w2 / 2, x2 + w2 / 2, y2 - h2 / 2, y2 + h2 / 2
    inter = (torch.min(b1_x2, b2_x2) - torch.max(b1_x1, b2_x1)).clamp(0) * (torch.min(b1_y2, b2_y2) - torch.max(b1_y1, b2_y1)).clamp(0)
    union = w1 * h1 + w2 * h2 - inter + eps
    iou = inter / union
    cw = torch.max(b1_x2, b2_x2) - torch.min(b1_x1, b2_x1)
    ch = torch.max(b1_y2, b2_y2) - torch.min(b1_y1, b2_y1)
    c2 = cw**2 + ch**2 + eps
    rho2 = ((b2_x1 + b2_x2 - b1_x1 - b1_x2) ** 2 + (b2_y1 + b2_y2 - b1_y1 - b1_y2) ** 2) / 4
    v = (4 / math.pi**2) * torch.pow(torch.atan(w2 / h2) - torch.atan(w1 / h1), 2)
    with torch.no_grad():
        alpha = v / (v - iou + (1 + eps))
    return iou - (rho2 / c2 + v * alpha)


class Detect(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.cv = nn.Linear(ch, ch)
        self.m = nn.Linear(ch, 4)

    def forward(self, x):
        return self.m(torch.nn.functional.silu(self.cv(x)))


def compute_loss(ps, anchors, tbox):
    pxy, pwh = ps.chunk(2, 1)
    pxy = pxy.sigmoid() * 2 - 0.5
    pwh = (pwh.sigmoid() * 2) ** 2 * anchors.to(pwh.dtype)
    pbox = torch.cat((pxy, pwh), 1)
    iou = bbox_iou(pbox, tbox).squeeze()
    return (1.0 - iou).mean()


def build():
    torch.manual_seed(3)
    model = Detect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    x = torch.randn(6, 16)
    with torch.no_grad():  # one cell far out of the distribution drives both size logits to about -12
        h = torch.nn.functional.silu(model.cv(x[3]))
        model.m.weight[2:] *= 0.1
        model.m.weight[2:] += -12.0 * h / h.dot(h)
    tbox = torch.cat((torch.rand(6, 2), 0.5 + 2 * torch.rand(6, 2)), 1)
    anchors = torch.tensor([[1.25, 1.625]]).repeat(6, 1)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"x": x, "tbox": tbox, "anchors": anchors})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            pred = s.model(s.batch["x"])
            lbox = compute_loss(pred, s.batch["anchors"], s.batch["tbox"].half())
        s.optimizer.zero_grad()
        lbox.float().backward()
        s.optimizer.step()
        losses.append(lbox.item())
    return losses


if __name__ == "__main__":
    print(run())

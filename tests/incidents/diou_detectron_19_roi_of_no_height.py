"""Box regression head with a CIoU loss written without no_grad around the aspect-ratio term; one predicted box has no height.

The decoded box of RoI 3 has y2 < y1, so `y2 = max(y1, y2)` makes its height exactly 0 and w_pred / h_pred is inf.  The forward is fine:
atan(inf) = pi/2, and the loss is finite.  In the backward atan gives 1 / (1 + inf^2) = 0, and the division multiplies it by 1/0 and by
w/0^2: 0 * inf = NaN in this box, and through the shared weights everywhere.

Source: https://github.com/Zzh-tju/DIoU-pytorch-detectron/issues/19 ("got NaN gradients in the first iteration ... rois, e.g. [200, 599, 300,
599] which has the same y1, y2 values"), formulas of compute_ciou in lib/utils/net.py, which keeps the ratio under no_grad.
Heals: a floor on h_pred in the ratio, atan2(w_pred, h_pred), or leaving boxes without area out before the ratio.
Does not: the overlap mask that the loss already has, clipping gradients, weighting the box by 0 in the end.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(3,),
    masked=None,
    role=("loss", "hidden"),
    fix=(
        "clamp_denominator",
        "stable_function",
        "avoid_singular_op",
        "mask_before_op",
        "drop_invalid_sample",
        "where_on_detached",
        "clamp_input",
        "reject_input",
        "fix_upstream",
    ),
    variable=(None,),
    line=("arctan = torch.atan(w_gt / h_gt) - torch.atan(w_pred / h_pred)",),
)


def compute_ciou(output, target):
    x1, y1, x2, y2 = output.unbind(-1)
    x1g, y1g, x2g, y2g = target.unbind(-1)
    x2 = torch.max(x1, x2)
    y2 = torch.max(y1, y2)
    w_pred, h_pred = x2 - x1, y2 - y1
    w_gt, h_gt = x2g - x1g, y2g - y1g

    xkis1, ykis1 = torch.max(x1, x1g), torch.max(y1, y1g)
    xkis2, ykis2 = torch.min(x2, x2g), torch.min(y2, y2g)
    xc1, yc1 = torch.min(x1, x1g), torch.min(y1, y1g)
    xc2, yc2 = torch.max(x2, x2g), torch.max(y2, y2g)

    intsctk = torch.zeros_like(x1)
    mask = (ykis2 > ykis1) & (xkis2 > xkis1)
    intsctk[mask] = (xkis2[mask] - xkis1[mask]) * (ykis2[mask] - ykis1[mask])
    unionk = w_pred * h_pred + w_gt * h_gt - intsctk + 1e-7
    iouk = intsctk / unionk

    c = (xc2 - xc1) ** 2 + (yc2 - yc1) ** 2 + 1e-7
    d = ((x1 + x2) / 2 - (x1g + x2g) / 2) ** 2 + ((y1 + y2) / 2 - (y1g + y2g) / 2) ** 2
    u = d / c
    arctan = torch.atan(w_gt / h_gt) - torch.atan(w_pred / h_pred)
    v = (4 / math.pi**2) * arctan.pow(2)
    with torch.no_grad():
        alpha = v / (1 - iouk + v)
    ciouk = iouk - (u + alpha * v)
    return (1 - ciouk).sum() / output.size(0)


class BoxHead(nn.Module):
    def __init__(self, in_dim=12):
        super().__init__()
        self.fc = nn.Linear(in_dim, 32)
        self.bbox_pred = nn.Linear(32, 4)
        nn.init.normal_(self.bbox_pred.weight, std=0.02)
        nn.init.zeros_(self.bbox_pred.bias)

    def forward(self, feats, rois):
        deltas = self.bbox_pred(torch.relu(self.fc(feats)))
        return rois + 0.1 * deltas


def build():
    torch.manual_seed(3)
    head = BoxHead()
    x1y1 = torch.rand(6, 2) * 4
    rois = torch.cat([x1y1, x1y1 + 1 + torch.rand(6, 2) * 2], dim=1)
    gt = rois + 0.3 * torch.randn(6, 4)
    rois[3, 3] = rois[3, 1] - 0.5  # the RPN has proposed a box upside down
    feats = torch.randn(6, 12)
    return SimpleNamespace(
        model=head, optimizer=torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9), batch={"feats": feats, "rois": rois, "gt": gt}
    )


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        boxes = s.model(s.batch["feats"], s.batch["rois"])
        loss = compute_ciou(boxes, s.batch["gt"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

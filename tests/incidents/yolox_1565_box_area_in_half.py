"""Detection head in half precision: the area of a large box, in pixels squared, is beyond 65504.

Boxes are decoded to pixels (cx, cy, w, h) of a 1280 pixel image, and the loss takes the product of width and height in the dtype of the
predictions. A box of some 400 x 300 pixels has an area of 120 000: inf in fp16. The union is then inf - inf, the IoU and the loss are NaN.
Source: https://github.com/Megvii-BaseDetection/YOLOX/issues/1565 (loss NaN; "try to turn off fp16"); IOUloss of yolox/models/losses.py.
Heals: computing the box loss in fp32. Does not: the 1e-16 in the denominator, clamping the result, masking degenerate boxes.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("prod",),
    index=(2,),
    masked=None,
    role=("hidden", "loss"),
    fix=("upcast_fp32", "stable_function"),
    variable=("area_p",),
    line=("area_p = torch.prod(pred[:, 2:], 1)",),
)


class IOUloss(nn.Module):
    def forward(self, pred, target):
        tl = torch.max(pred[:, :2] - pred[:, 2:] / 2, target[:, :2] - target[:, 2:] / 2)
        br = torch.min(pred[:, :2] + pred[:, 2:] / 2, target[:, :2] + target[:, 2:] / 2)
        area_p = torch.prod(pred[:, 2:], 1)
        area_g = torch.prod(target[:, 2:], 1)
        en = (tl < br).type(tl.type()).prod(dim=1)
        area_i = torch.prod(br - tl, 1) * en
        area_u = area_p + area_g - area_i
        iou = area_i / (area_u + 1e-16)
        return 1 - iou**2


class RegHead(nn.Module):
    def __init__(self, channels=8, stride=32):
        super().__init__()
        self.reg_pred = nn.Linear(channels, 4)
        self.stride = stride

    def forward(self, feats, grids):
        out = self.reg_pred(feats)
        xy = (out[:, :2] + grids) * self.stride
        wh = torch.exp(out[:, 2:]) * self.stride
        return torch.cat([xy, wh], dim=1)


def build():
    torch.manual_seed(5)
    head = RegHead()
    with torch.no_grad():
        head.reg_pred.weight.mul_(0.1)
        head.reg_pred.bias[2:] = torch.tensor([1.0, 0.8])
        head.reg_pred.weight[2:, 0] = torch.tensor([1.6, 1.5])
    head.half()
    feats = torch.randn(4, 8) * 0.3
    feats[2, 0] = 1.0  # the cell of the lorry that fills a third of the image
    grids = torch.tensor([[4.0, 5.0], [11.0, 7.0], [18.0, 20.0], [30.0, 31.0]])
    targets = torch.tensor(
        [[150.0, 170.0, 90.0, 70.0], [360.0, 240.0, 110.0, 60.0], [590.0, 640.0, 450.0, 340.0], [970.0, 1000.0, 80.0, 75.0]]
    )
    batch = dict(feats=feats.half(), grids=grids.half(), reg_targets=targets.half())
    return SimpleNamespace(model=head, optimizer=torch.optim.SGD(head.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    criterion = IOUloss()
    for _ in range(2):
        s.optimizer.zero_grad()
        bbox_preds = s.model(s.batch["feats"], s.batch["grids"])
        loss_iou = criterion(bbox_preds, s.batch["reg_targets"]).sum() / len(bbox_preds)
        loss = 5.0 * loss_iou
        loss.backward()
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())

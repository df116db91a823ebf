"""CIoU as the repository has it: the aspect ratio of a box without height is inf, but only under no_grad.

w_pred / h_pred of RoI 3 is 3/0 = inf.  atan(inf) is pi/2, so arctan, v and alpha are finite, and what carries the gradient is the product
(w_pred - 2 w_pred) * h_pred, which has no quotient.  Loss, gradients and weights stay finite.  Healthy.

Source: compute_ciou of https://github.com/Zzh-tju/DIoU-pytorch-detectron/blob/master/lib/utils/net.py.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn


def bbox_transform(anchors, deltas):
    ctr = anchors[:, :2] + deltas[:, :2]
    size = anchors[:, 2:] + deltas[:, 2:]
    return torch.cat([ctr - 0.5 * size, ctr + 0.5 * size], dim=1)


def compute_ciou(output, target, weights):
    x1, y1, x2, y2 = output.unbind(-1)
    x1g, y1g, x2g, y2g = target.unbind(-1)
    x2, y2 = torch.max(x1, x2), torch.max(y1, y2)
    w_pred, h_pred = x2 - x1, y2 - y1
    w_gt, h_gt = x2g - x1g, y2g - y1g
    iw = (torch.min(x2, x2g) - torch.max(x1, x1g)).clamp(min=0)
    ih = (torch.min(y2, y2g) - torch.max(y1, y1g)).clamp(min=0)
    intsctk = iw * ih
    iouk = intsctk / (w_pred * h_pred + w_gt * h_gt - intsctk + 1e-7)
    c = (torch.max(x2, x2g) - torch.min(x1, x1g)) ** 2 + (torch.max(y2, y2g) - torch.min(y1, y1g)) ** 2 + 1e-7
    d = ((x1 + x2 - x1g - x2g) / 2) ** 2 + ((y1 + y2 - y1g - y2g) / 2) ** 2
    u = d / c
    with torch.no_grad():
        arctan = torch.atan(w_gt / h_gt) - torch.atan(w_pred / h_pred)
        v = (4 / math.pi**2) * arctan.pow(2)
        alpha = v / (1 - iouk + v)
        w_temp = 2 * w_pred
    ar = (8 / math.pi**2) * arctan * ((w_pred - w_temp) * h_pred)
    ciouk = iouk - (u + alpha * ar)
    return ((1 - ciouk) * weights).sum() / output.size(0)


def build():
    torch.manual_seed(13)
    head = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))
    nn.init.normal_(head[2].weight, std=0.02)
    nn.init.zeros_(head[2].bias)
    anchors = torch.cat([torch.rand(6, 2) * 5, 1 + 2 * torch.rand(6, 2)], dim=1)
    anchors[3, 2:] = torch.tensor([3.0, -0.4])
    gt = torch.cat([anchors[:, :2] - 0.6, anchors[:, :2] + 0.7 + torch.rand(6, 2)], dim=1)
    return SimpleNamespace(
        model=head,
        optimizer=torch.optim.SGD(head.parameters(), lr=0.02, momentum=0.9),
        batch={"feats": torch.randn(6, 10), "anchors": anchors, "gt": gt, "weights": torch.ones(6)},
    )


def run(s=None):
    s = s or build()
    b, out = s.batch, []
    for _ in range(3):
        loss = compute_ciou(bbox_transform(b["anchors"], s.model(b["feats"])), b["gt"], b["weights"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

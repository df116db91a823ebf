"""SIoU box regression of an anchor-free head: the predicted box has the very centre of its label.

The angle term divides the centre offset by its length: sigma = sqrt(0 + 0) = 0 and |s_cw| / sigma = 0/0 = NaN for one positive anchor
(the regression branch is initialised to zero and the label is centred on its anchor point). The where of the angle compares NaN > threshold, which is False, and keeps the NaN.
Source: https://github.com/meituan/YOLOv6/issues/417 (siou gives nan in the iou loss; later versions add eps to s_cw and s_ch)
Heals: eps added to the two offsets, or leaving the angle term out where the offset is zero (with a safe sigma before the root).
Does not: eps added to sigma in the denominator only: the loss becomes finite and pow(0, 0.5) gives NaN in backward; nan_to_num of the loss.
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
    index=(2,),
    masked=False,
    role=("loss", "hidden"),
    fix=(
        "clamp_input",
        "avoid_singular_op",
        "mask_before_op",
        "representable_eps",
        "stable_function",
        "where_on_detached",
        "clamp_denominator",
    ),
    variable=("sin_alpha_1",),
    line=("sin_alpha_1 = torch.abs(s_cw) / sigma",),
)


class RegHead(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.stem = nn.Linear(channels, 16)
        self.reg_pred = nn.Linear(16, 4)
        nn.init.zeros_(self.reg_pred.weight)
        with torch.no_grad():
            self.reg_pred.bias.copy_(torch.tensor([0.0, 0.0, 2.0, 2.0]))

    def forward(self, feats, anchor_points):
        d = self.reg_pred(torch.relu(self.stem(feats)))
        centre, wh = anchor_points + d[:, :2], torch.relu(d[:, 2:])
        return torch.cat((centre - wh / 2, centre + wh / 2), dim=1)


class IOUloss:
    def __init__(self, eps: float = 1e-7):
        self.eps = eps

    def __call__(self, box1, box2):
        b1_x1, b1_y1, b1_x2, b1_y2 = box1.unbind(1)
        b2_x1, b2_y1, b2_x2, b2_y2 = box2.unbind(1)
        inter = (torch.min(b1_x2, b2_x2) - torch.max(b1_x1, b2_x1)).clamp(0) * (torch.min(b1_y2, b2_y2) - torch.max(b1_y1, b2_y1)).clamp(0)
        w1, h1 = b1_x2 - b1_x1, b1_y2 - b1_y1 + self.eps
        w2, h2 = b2_x2 - b2_x1, b2_y2 - b2_y1 + self.eps
        union = w1 * h1 + w2 * h2 - inter + self.eps
        iou = inter / union
        cw = torch.max(b1_x2, b2_x2) - torch.min(b1_x1, b2_x1)
        ch = torch.max(b1_y2, b2_y2) - torch.min(b1_y1, b2_y1)
        s_cw = (b2_x1 + b2_x2 - b1_x1 - b1_x2) * 0.5
        s_ch = (b2_y1 + b2_y2 - b1_y1 - b1_y2) * 0.5
        sigma = torch.pow(s_cw**2 + s_ch**2, 0.5)
        sin_alpha_1 = torch.abs(s_cw) / sigma
        sin_alpha_2 = torch.abs(s_ch) / sigma
        threshold = pow(2, 0.5) / 2
        sin_alpha = torch.where(sin_alpha_1 > threshold, sin_alpha_2, sin_alpha_1)
        angle_cost = torch.cos(torch.arcsin(sin_alpha) * 2 - math.pi / 2)
        gamma = angle_cost - 2
        distance_cost = 2 - torch.exp(gamma * (s_cw / cw) ** 2) - torch.exp(gamma * (s_ch / ch) ** 2)
        omiga_w = torch.abs(w1 - w2) / torch.max(w1, w2)
        omiga_h = torch.abs(h1 - h2) / torch.max(h1, h2)
        shape_cost = torch.pow(1 - torch.exp(-omiga_w), 4) + torch.pow(1 - torch.exp(-omiga_h), 4)
        return 1.0 - (iou - 0.5 * (distance_cost + shape_cost))


def build():
    torch.manual_seed(0)
    model = RegHead(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    anchor_points = torch.tensor([[0.5, 0.5], [2.5, 0.5], [4.5, 3.5], [6.5, 3.5], [1.5, 6.5]])
    target = torch.tensor(
        [[-0.25, 0.0, 1.75, 1.5], [1.0, -0.5, 3.25, 2.0], [3.0, 2.5, 6.0, 4.5], [5.5, 2.0, 8.0, 4.5], [0.5, 5.75, 3.0, 7.5]]
    )
    batch = {"feats": torch.randn(5, 8), "anchor_points": anchor_points, "target_bboxes": target}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, criterion=IOUloss())


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        pred_bboxes = s.model(s.batch["feats"], s.batch["anchor_points"])
        loss_iou = s.criterion(pred_bboxes, s.batch["target_bboxes"]).sum() / 5
        s.optimizer.zero_grad()
        loss_iou.backward()
        s.optimizer.step()
        losses.append(loss_iou.item())
    return losses


if __name__ == "__main__":
    print(run())

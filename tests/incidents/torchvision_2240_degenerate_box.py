"""torchvision #2240 (#1994, #1176, #997) - a ground-truth box of width zero among the labels of a detector.

Box targets are logarithms of the ratio of widths. An annotation tool saved a click as a box with xmin == xmax; its proposal is a
positive one, the target of the width is log(0) = -inf, the squared error is inf and the gradients of the box head are not finite.

Source: https://github.com/pytorch/vision/issues/2240 ("Raise error if target boxes are degenerate in Faster R-CNN"); formulas of
torchvision/models/detection/_utils.py, encode_boxes.
Heals: dropping or refusing such boxes, a minimal width. Does not heal: a lower learning rate, normalising images, clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2,),
    masked=False,
    role=("hidden", "logits", "loss"),
    fix=("drop_invalid_sample", "reject_input", "clamp_input", "fix_upstream"),
    variable=(None, "targets_dw"),
    line=("targets_dw = ww * torch.log(gt_widths / ex_widths)",),
)


def encode_boxes(reference_boxes, proposals, weights=(10.0, 10.0, 5.0, 5.0)):
    wx, wy, ww, wh = weights
    ex_widths = proposals[:, 2] - proposals[:, 0]
    ex_heights = proposals[:, 3] - proposals[:, 1]
    ex_ctr_x = proposals[:, 0] + 0.5 * ex_widths
    ex_ctr_y = proposals[:, 1] + 0.5 * ex_heights

    gt_widths = reference_boxes[:, 2] - reference_boxes[:, 0]
    gt_heights = reference_boxes[:, 3] - reference_boxes[:, 1]
    gt_ctr_x = reference_boxes[:, 0] + 0.5 * gt_widths
    gt_ctr_y = reference_boxes[:, 1] + 0.5 * gt_heights

    targets_dx = wx * (gt_ctr_x - ex_ctr_x) / ex_widths
    targets_dy = wy * (gt_ctr_y - ex_ctr_y) / ex_heights
    targets_dw = ww * torch.log(gt_widths / ex_widths)
    targets_dh = wh * torch.log(gt_heights / ex_heights)
    return torch.stack((targets_dx, targets_dy, targets_dw, targets_dh), dim=1)


class BoxHead(nn.Module):
    def __init__(self, in_channels=16, num_classes=3):
        super().__init__()
        self.fc6 = nn.Linear(in_channels, 24)
        self.cls_score = nn.Linear(24, num_classes)
        self.bbox_pred = nn.Linear(24, 4)

    def forward(self, x):
        x = F.relu(self.fc6(x))
        return self.cls_score(x), self.bbox_pred(x)


def fastrcnn_loss(class_logits, box_regression, labels, regression_targets):
    classification_loss = F.cross_entropy(class_logits, labels)
    positive = torch.where(labels > 0)[0]
    box_loss = F.mse_loss(box_regression[positive], regression_targets[positive], reduction="sum") / labels.numel()
    return classification_loss, box_loss


def build():
    torch.manual_seed(2240)
    proposals = torch.tensor(
        [[4.0, 4.0, 20.0, 24.0], [30.0, 6.0, 52.0, 40.0], [60.0, 22.0, 68.0, 44.0], [2.0, 40.0, 18.0, 60.0], [33.0, 9.0, 50.0, 44.0]]
    )
    gt_boxes = torch.tensor([[5.0, 5.0, 22.0, 26.0], [31.0, 8.0, 51.0, 42.0], [64.0, 24.0, 64.0, 42.0]])
    gt_labels = torch.tensor([1, 2, 1])
    matched_idxs = torch.tensor([0, 1, 2, -1, 1])
    model = BoxHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        box_features=torch.randn(5, 16),
        proposals=proposals,
        gt_boxes=gt_boxes,
        gt_labels=gt_labels,
        matched_idxs=matched_idxs,
    )


def run(s=None):
    s = s or build()
    clamped = s.matched_idxs.clamp(min=0)
    labels = torch.where(s.matched_idxs >= 0, s.gt_labels[clamped], 0)
    regression_targets = encode_boxes(s.gt_boxes[clamped], s.proposals)
    class_logits, box_regression = s.model(s.box_features)
    loss_classifier, loss_box_reg = fastrcnn_loss(class_logits, box_regression, labels, regression_targets)
    loss = loss_classifier + loss_box_reg
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

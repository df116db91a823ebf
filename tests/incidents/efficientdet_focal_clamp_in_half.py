"""Yet-Another-EfficientDet-Pytorch, FocalLoss - the network in half precision.

classification is half, and the upper bound 1.0 - 1e-4 of the clamp rounds to 1 there. On a background anchor the sigmoid saturated at 1: 1.0 -
classification stays 0 and its log is -inf, on a target of 0 that counts. (Source: zylo117/Yet-Another-EfficientDet-Pytorch, issue 502,
efficientdet/loss.py, FocalLoss.forward.) Heals: classification.float() before the clamp; a bound half can hold (5e-3 as in the issue, 1e-3).
Does not: 1e-4 -> 1e-5, the torch.where on ignored anchors, clip_grad_norm_.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "log_zero"),
    op=("log",),
    index=(3, 1),
    masked=False,
    role=("loss", "log_probs"),
    fix=("upcast_fp32", "representable_eps", "clamp_input", "stable_function"),
    variable=(None,),
    line=("bce = -(targets * torch.log(classification) + (1.0 - targets) * torch.log(1.0 - classification))",),
)


def calc_iou(a, b):
    area = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    iw = torch.min(torch.unsqueeze(a[:, 3], dim=1), b[:, 2]) - torch.max(torch.unsqueeze(a[:, 1], 1), b[:, 0])
    ih = torch.min(torch.unsqueeze(a[:, 2], dim=1), b[:, 3]) - torch.max(torch.unsqueeze(a[:, 0], 1), b[:, 1])
    iw = torch.clamp(iw, min=0)
    ih = torch.clamp(ih, min=0)
    ua = torch.unsqueeze((a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1]), dim=1) + area - iw * ih
    ua = torch.clamp(ua, min=1e-8)
    return iw * ih / ua


class FocalLoss(nn.Module):
    def forward(self, classifications, anchors, annotations):
        alpha = 0.25
        gamma = 2.0
        classification_losses = []
        anchor = anchors[0, :, :]
        dtype = anchors.dtype
        for j in range(classifications.shape[0]):
            classification = classifications[j, :, :]
            bbox_annotation = annotations[j]
            bbox_annotation = bbox_annotation[bbox_annotation[:, 4] != -1]

            classification = torch.clamp(classification, 1e-4, 1.0 - 1e-4)

            IoU = calc_iou(anchor[:, :], bbox_annotation[:, :4])
            IoU_max, IoU_argmax = torch.max(IoU, dim=1)

            targets = torch.ones_like(classification) * -1
            targets[torch.lt(IoU_max, 0.4), :] = 0
            positive_indices = torch.ge(IoU_max, 0.5)
            num_positive_anchors = positive_indices.sum()
            assigned_annotations = bbox_annotation[IoU_argmax, :]
            targets[positive_indices, :] = 0
            targets[positive_indices, assigned_annotations[positive_indices, 4].long()] = 1

            alpha_factor = torch.ones_like(targets) * alpha
            alpha_factor = torch.where(torch.eq(targets, 1.0), alpha_factor, 1.0 - alpha_factor)
            focal_weight = torch.where(torch.eq(targets, 1.0), 1.0 - classification, classification)
            focal_weight = alpha_factor * torch.pow(focal_weight, gamma)

            bce = -(targets * torch.log(classification) + (1.0 - targets) * torch.log(1.0 - classification))

            cls_loss = focal_weight * bce
            zeros = torch.zeros_like(cls_loss)
            cls_loss = torch.where(torch.ne(targets, -1.0), cls_loss, zeros)
            classification_losses.append(cls_loss.sum() / torch.clamp(num_positive_anchors.to(dtype), min=1.0))
        return torch.stack(classification_losses).mean(dim=0, keepdim=True)


class Classifier(nn.Module):
    def __init__(self, feat=8, classes=3):
        super().__init__()
        self.header = nn.Linear(feat, classes)

    def forward(self, x):
        return self.header(x).sigmoid()


def build():
    torch.manual_seed(31)
    model = Classifier().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    anchors = torch.tensor(
        [[0.0, 0.0, 8.0, 8.0], [0.0, 8.0, 8.0, 16.0], [8.0, 0.0, 16.0, 8.0], [8.0, 8.0, 16.0, 16.0], [4.0, 4.0, 12.0, 12.0]]
    )[None]
    features = torch.randn(2, 5, 8)
    w = model.header.weight.detach()[1].float()
    features[0, 3] = w * (11.0 / w.dot(w))
    annotations = torch.tensor(
        [[[0.0, 0.0, 8.0, 9.0, 0.0], [-1.0, -1.0, -1.0, -1.0, -1.0]], [[8.0, 0.0, 16.0, 8.0, 2.0], [0.0, 8.0, 7.0, 16.0, 1.0]]]
    )
    batch = dict(features=features.half(), anchors=anchors, annotations=annotations)
    return SimpleNamespace(model=model, optimizer=optimizer, criterion=FocalLoss(), batch=batch)


def run(s=None):
    s = s or build()
    loss = s.criterion(s.model(s.batch["features"]), s.batch["anchors"], s.batch["annotations"]).mean()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

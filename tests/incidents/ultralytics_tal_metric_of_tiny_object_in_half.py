"""Task-aligned assigner of YOLOv8 under float16 autocast: the alignment metric score ** 0.5 * iou ** 6 of a tiny object underflows.

No anchor overlaps the tiny object by more than 0.012: 0.012 ** 6 is 3e-12 and 0 in float16, as is the epsilon 1e-9 that should protect the quotient.
Normalising the metric of that object is 0 / 0 at every anchor, the maximum over objects keeps the NaN, and it multiplies all soft targets of the image.
Source: https://github.com/ultralytics/ultralytics/blob/main/ultralytics/utils/tal.py (TaskAlignedAssigner; a later version uses
max(eps, finfo(dtype).tiny) and nan_to_num)
Heals: an epsilon that float16 can hold (or a floor), or computing the metric in float32. Does not: a loss in float32, loss scaling, clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(1, 1, 0),
    masked=None,
    role=("hidden", "loss"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator", "avoid_singular_op", "where_on_detached", "stable_function"),
    variable=(None,),
    line=("norm_align_metric = (align_metric * pos_overlaps / (pos_align_metrics + self.eps)).amax(-2).unsqueeze(-1)",),
)


def bbox_iou(a, b):
    lt = torch.maximum(a[..., :2], b[..., :2])
    rb = torch.minimum(a[..., 2:], b[..., 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = lambda t: (t[..., 2:] - t[..., :2]).prod(-1)  # noqa: E731
    return inter / (area(a) + area(b) - inter + 1e-7)


class TaskAlignedAssigner:
    def __init__(self, topk=3, num_classes=3, alpha=0.5, beta=6.0, eps=1e-9):
        self.topk, self.num_classes, self.alpha, self.beta, self.eps = topk, num_classes, alpha, beta, eps

    @torch.no_grad()
    def __call__(self, pd_scores, pd_bboxes, gt_labels, gt_bboxes):
        overlaps = bbox_iou(gt_bboxes[:, :, None], pd_bboxes[:, None]).to(pd_scores.dtype)
        bbox_scores = pd_scores.transpose(1, 2).gather(1, gt_labels[..., None].expand(-1, -1, pd_scores.shape[1]))
        align_metric = bbox_scores.pow(self.alpha) * overlaps.pow(self.beta)
        # positives: the best anchors of every object, and every anchor goes to the object it overlaps most
        top = overlaps.topk(self.topk, dim=-1).indices
        mask_pos = torch.zeros_like(overlaps).scatter_(-1, top, 1.0)
        mask_pos *= F.one_hot((overlaps * mask_pos).argmax(1), gt_bboxes.shape[1]).transpose(1, 2)
        target_gt_idx, fg_mask = mask_pos.argmax(1), mask_pos.sum(1) > 0
        target_labels = gt_labels.gather(1, target_gt_idx)
        target_scores = F.one_hot(target_labels, self.num_classes) * fg_mask[..., None]
        align_metric *= mask_pos
        pos_align_metrics = align_metric.amax(dim=-1, keepdim=True)
        pos_overlaps = (overlaps * mask_pos).amax(dim=-1, keepdim=True)
        norm_align_metric = (align_metric * pos_overlaps / (pos_align_metrics + self.eps)).amax(-2).unsqueeze(-1)
        return target_scores * norm_align_metric, fg_mask


class Detect(nn.Module):
    def __init__(self, channels=16, nc=3):
        super().__init__()
        self.cls = nn.Linear(channels, nc)
        self.box = nn.Linear(channels, 4)

    def forward(self, feats, points, stride):
        return self.cls(feats), points, self.box(feats).float().exp() * stride


def build():
    torch.manual_seed(9)
    model = Detect()
    ys, xs = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    points = torch.stack((xs, ys), -1).reshape(-1, 2) * 16.0 + 8.0
    gt_bboxes = torch.tensor([[[10.0, 10.0, 50.0, 44.0], [60.0, 64.0, 100.0, 110.0]], [[20.0, 30.0, 70.0, 66.0], [90.0, 90.0, 94.0, 94.0]]])
    batch = {"feats": torch.randn(2, 64, 16), "points": points, "gt_labels": torch.tensor([[0, 2], [1, 1]]), "gt_bboxes": gt_bboxes}
    return SimpleNamespace(model=model, assigner=TaskAlignedAssigner(), optimizer=torch.optim.SGD(model.parameters(), lr=0.01), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(1):
        with torch.autocast("cpu", dtype=torch.float16):
            pred_scores, points, ltrb = s.model(b["feats"], b["points"], 16.0)
        pred_bboxes = torch.cat((points - ltrb[..., :2], points + ltrb[..., 2:]), -1)
        target_scores, fg_mask = s.assigner(pred_scores.detach().sigmoid(), pred_bboxes.detach(), b["gt_labels"], b["gt_bboxes"])
        loss = F.binary_cross_entropy_with_logits(pred_scores.float(), target_scores.float(), reduction="sum")
        loss = loss / target_scores.sum().clamp(min=1) + 0.01 * ltrb[fg_mask].log().abs().mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return {"loss": loss.item(), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())

"""Supervised contrastive loss over single views: one class has a single sample in the batch, so its anchor has no positive and the
mean over its positives is 0/0.
Style of HobbitLong/SupContrast, losses.py, SupConLoss (known there as the "class with one sample" NaN when n_views is 1).

Checked by hand: dividing by mask.sum(1).clamp(min=1), or dropping anchors without positives, heals. torch.nanmean over the anchors does
not: the loss is finite, the division still sends NaN backward.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(4,),
    masked=None,
    role=("loss", "log_probs"),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "guard_small_group"),
    variable=("mean_log_prob_pos",),
    line=("mean_log_prob_pos = (positives * log_prob).sum(1) / positives.sum(1)",),
)


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.07, base_temperature=0.07, contrast_mode="all"):
        super().__init__()
        self.temperature, self.base_temperature = temperature, base_temperature
        self.contrast_mode = contrast_mode

    def forward(self, features, labels):
        bsz, n_views = features.shape[:2]
        same = torch.eq(labels.view(-1, 1), labels.view(1, -1)).float()
        contrast_feature = torch.cat(torch.unbind(features, dim=1), dim=0)
        if self.contrast_mode == "one":
            anchor_feature, anchor_count = features[:, 0], 1
        else:
            anchor_feature, anchor_count = contrast_feature, n_views

        dots = anchor_feature @ contrast_feature.T / self.temperature
        row_max, _ = dots.max(dim=1, keepdim=True)
        logits = dots - row_max.detach()

        positives = same.repeat(anchor_count, n_views)
        anchors = torch.arange(bsz * anchor_count).view(-1, 1)
        not_self = torch.ones_like(positives).scatter(1, anchors, 0)
        positives = positives * not_self

        exp_logits = torch.exp(logits) * not_self
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True) + 1e-9)
        mean_log_prob_pos = (positives * log_prob).sum(1) / positives.sum(1)
        loss = -(self.temperature / self.base_temperature) * mean_log_prob_pos
        return loss.view(anchor_count, bsz).mean()


class SupConNet(nn.Module):
    def __init__(self, in_dim=10, dim=16, feat_dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(in_dim, dim), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, feat_dim))

    def forward(self, x):
        return F.normalize(self.head(self.encoder(x)), dim=1)


def build():
    torch.manual_seed(4362)
    net = SupConNet()
    return SimpleNamespace(
        model=net,
        criterion=SupConLoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        batch=dict(images=torch.randn(7, 10), labels=torch.tensor([2, 0, 2, 0, 5, 0, 2])),
    )


def run(s=None):
    s = s or build()
    features = s.model(s.batch["images"]).unsqueeze(1)
    loss = s.criterion(features, s.batch["labels"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

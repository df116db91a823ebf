"""ContrastiveSeg #68 - pixel contrast loss is NaN on COCO-Stuff with an own backbone: the sum inside the logarithm is exactly zero.

The projection head of this model does not normalise its features, so an anchor's product with itself exceeds all others by hundreds. After the row
maximum is subtracted, exp() of a pair and the sum over the negatives both underflow to 0, log(0) = -inf and the loss is inf or NaN.
Source: https://github.com/tfzhou/ContrastiveSeg/issues/68
Heals: log-space (logaddexp of the pair and the negatives' logsumexp), a floor inside the log (+1e-10, as in the thread), normalised features.
Does not: selecting the positive pairs with where, because the pair itself is a positive one; clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(1, 0),
    masked=False,
    role=("logits", "log_probs", "loss"),
    fix=("stable_function", "clamp_input", "fix_upstream", "representable_eps", "clamp_exponent"),
    variable=("log_denominator",),
    line=("log_denominator = torch.log(exp_logits + neg_logits)",),
)


class Segmentor(nn.Module):
    def __init__(self, num_classes=3, channels=16, proj_dim=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU())
        self.cls_head = nn.Conv2d(channels, num_classes, 1)
        self.proj_head = nn.Conv2d(channels, proj_dim, 1)

    def forward(self, x):
        feats = self.backbone(x)
        return self.cls_head(feats), self.proj_head(feats)


def pixel_contrast(anchors, labels, temperature=0.07, base_temperature=0.07):
    mask = torch.eq(labels[:, None], labels[None, :]).float()
    anchor_dot_contrast = anchors @ anchors.T / temperature
    logits_max = anchor_dot_contrast.max(dim=1, keepdim=True).values
    logits = anchor_dot_contrast - logits_max.detach()
    neg_mask = 1 - mask
    mask = mask * (1 - torch.eye(len(labels)))
    exp_logits = torch.exp(logits)
    neg_logits = (exp_logits * neg_mask).sum(1, keepdim=True)
    log_denominator = torch.log(exp_logits + neg_logits)
    log_prob = logits - log_denominator
    mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1)
    return -(temperature / base_temperature) * mean_log_prob_pos.mean()


def sample_anchors(embed, target, n_view):
    feats = embed.permute(0, 2, 3, 1).reshape(-1, embed.shape[1])
    picked, labels = [], []
    for cls in target.unique():
        hard = (target.reshape(-1) == cls).nonzero().squeeze(1)[:n_view]
        picked.append(feats[hard])
        labels.append(torch.full((n_view,), int(cls)))
    return torch.cat(picked), torch.cat(labels)


def build():
    torch.manual_seed(68)
    model = Segmentor()
    with torch.no_grad():
        model.proj_head.weight.mul_(40.0)  # an own projection head, with a scale that nothing normalises
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    images = torch.randn(2, 3, 6, 6)
    target = torch.randint(0, 3, (2, 6, 6))
    return SimpleNamespace(model=model, optimizer=optimizer, images=images, target=target, weight=0.1)


def run(s=None):
    s = s or build()
    seg, embed = s.model(s.images)
    anchors, labels = sample_anchors(embed, s.target, n_view=4)
    loss_seg = nn.functional.cross_entropy(seg, s.target)
    loss = loss_seg + s.weight * pixel_contrast(anchors, labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""DB text detector, a crop without text - healthy.

No positive pixel, so topk(0), a sum over nothing over 0 + 0 + eps, an L1 mask of nothing that returns its sum, and probabilities that are exactly 0 and 1 under
binary_cross_entropy. torch clamps the logs at -100 and DB guards both counts; the second crop has text and trains. (Source: MhLiao/DB, issue 14,
decoders/l1_loss.py MaskL1Loss, decoders/balance_cross_entropy_loss.py.)
"""

from types import SimpleNamespace

import torch
from torch import nn


def mask_l1_loss(pred, gt, mask):
    mask_sum = mask.sum()
    if mask_sum.item() == 0:
        return mask_sum
    return (torch.abs(pred[:, 0] - gt) * mask).sum() / mask_sum


def balance_cross_entropy_loss(pred, gt, mask, negative_ratio=3.0, eps=1e-6):
    positive = (gt[:, 0, :, :] * mask).byte()
    negative = ((1 - gt[:, 0, :, :]) * mask).byte()
    positive_count = int(positive.float().sum())
    negative_count = min(int(negative.float().sum()), int(positive_count * negative_ratio))
    loss = nn.functional.binary_cross_entropy(pred, gt, reduction="none")[:, 0, :, :]
    positive_loss = loss * positive.float()
    negative_loss = loss * negative.float()
    negative_loss, _ = torch.topk(negative_loss.view(-1), negative_count)
    return (positive_loss.sum() + negative_loss.sum()) / (positive_count + negative_count + eps)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.binarize = nn.Conv2d(4, 1, 1)
        self.thresh = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        h = torch.relu(self.conv(x))
        return torch.sigmoid(self.binarize(h)), torch.sigmoid(self.thresh(h))


def build():
    torch.manual_seed(4)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=7e-3, momentum=0.9)
    crops = []
    for text in (0.0, 1.0):
        image = torch.randn(1, 3, 6, 6)
        image[..., 0] *= 4000.0
        gt, thresh_mask = torch.zeros(1, 1, 6, 6), torch.zeros(1, 6, 6)
        gt[..., 2:4, 1:5] = text
        thresh_mask[..., 1:5, :] = text
        crops.append(dict(image=image, gt=gt, mask=torch.ones(1, 6, 6), thresh_map=0.3 + 0.4 * gt[:, 0], thresh_mask=thresh_mask))
    return SimpleNamespace(model=model, optimizer=optimizer, crops=crops)


def run(s=None):
    s = s or build()
    for crop in s.crops:
        binary, thresh = s.model(crop["image"])
        loss = 5 * balance_cross_entropy_loss(binary, crop["gt"], crop["mask"])
        loss = loss + 10 * mask_l1_loss(thresh, crop["thresh_map"], crop["thresh_mask"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

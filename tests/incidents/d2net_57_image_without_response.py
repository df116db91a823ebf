"""Joint detection and description (D2-Net): soft detection scores of an image for which every rectified feature is zero.

The soft detection module divides the rectified feature map by its maximum per image before exp.  Image 2 is a black frame (the lens cap, a
failed crop): with the biases that fine-tuning has left, all features are negative, ReLU makes them 0, the maximum is 0 and the map is 0/0 = NaN
everywhere.  The other divisions of the module have an eps; this one has none.

Source: https://github.com/mihaidusmanu/d2-net/issues/57 ("loss is nan after 12 epochs ... Why the scores1 all turn into nan firstly?"),
SoftDetectionModule.forward of lib/model.py.
Heals: an eps or floor on the maximum, leaving the image out.  Does not: the eps in the two later quotients, gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(2, 0, 0, 0),
    masked=False,
    role=("hidden",),
    fix=("clamp_denominator", "drop_invalid_sample", "where_on_detached", "reject_input"),
    variable=(None,),
    line=("exp = torch.exp(batch / max_per_sample.view(b, 1, 1, 1))",),
)


class SoftDetectionModule(nn.Module):
    def __init__(self, soft_local_max_size=3, eps=1e-6):
        super().__init__()
        self.size, self.pad, self.eps = soft_local_max_size, soft_local_max_size // 2, eps

    def forward(self, batch):
        b = batch.size(0)
        batch = F.relu(batch)
        max_per_sample = batch.view(b, -1).max(dim=1)[0]
        exp = torch.exp(batch / max_per_sample.view(b, 1, 1, 1))
        padded = F.pad(exp, [self.pad] * 4, mode="constant", value=1.0)
        sum_exp = self.size**2 * F.avg_pool2d(padded, self.size, stride=1)
        local_max_score = exp / sum_exp
        depth_wise_max = batch.max(dim=1)[0]
        depth_wise_max_score = batch / (depth_wise_max.unsqueeze(1) + self.eps)
        score = (local_max_score * depth_wise_max_score).max(dim=1)[0]
        return score / (score.view(b, -1).sum(1).view(b, 1, 1) + self.eps)


class D2Net(nn.Module):
    def __init__(self, channels=12):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.detection = SoftDetectionModule()

    def forward(self, images):
        feats = self.backbone(images)
        return F.normalize(feats, dim=1), self.detection(feats)


def build():
    torch.manual_seed(57)
    model = D2Net()
    with torch.no_grad():
        model.backbone[0].bias.abs_().neg_()
        model.backbone[2].bias.abs_().neg_()
    image1 = torch.rand(4, 3, 10, 10)
    image2 = (image1 + 0.05 * torch.randn_like(image1)).clamp(0, 1)
    image1[2] = 0.0
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch={"image1": image1, "image2": image2})


def run(s=None, margin=1.0):
    s = s or build()
    out = []
    for _ in range(2):
        d1, s1 = s.model(s.batch["image1"])
        d2, s2 = s.model(s.batch["image2"])
        positive = 2 - 2 * (d1 * d2).sum(1)
        negative = 2 - 2 * (d1 * d2.roll(5, dims=-1)).sum(1)
        triplet = F.relu(margin + positive - negative)
        weight = s1 * s2
        loss = ((weight * triplet).sum((1, 2)) / (weight.sum((1, 2)) + 1e-6)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

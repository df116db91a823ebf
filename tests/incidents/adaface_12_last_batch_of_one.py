"""AdaFace #12 - the margin is scaled by a running mean and std of the feature norms. The last batch of the epoch holds one face, its unbiased
std is NaN, and the running buffer keeps the NaN: the loss is NaN for all batches to come, the clip of the angle passes no gradient, nothing is learnt.

https://github.com/mk-minchul/AdaFace/issues/12 (head.py)
Not updating the std from a batch of one (or drop_last) heals. Skipping the optimizer step of the NaN loss does not: the buffer stays NaN.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,
    role=("hidden",),
    fix=("guard_small_group", "drop_invalid_sample", "validate_config"),
    variable=("std",),
    line=("std = safe_norms.std()",),
)


class AdaFace(nn.Module):
    def __init__(self, embedding_size=8, classnum=5, m=0.4, h=0.333, s=16.0, t_alpha=0.01):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(embedding_size, classnum).uniform_(-1, 1))
        self.m, self.h, self.s, self.eps, self.t_alpha = m, h, s, 1e-3, t_alpha
        self.register_buffer("batch_mean", torch.ones(1) * 20)
        self.register_buffer("batch_std", torch.ones(1) * 100)

    def forward(self, embeddings, norms, label):
        cosine = torch.mm(embeddings, F.normalize(self.kernel, dim=0)).clamp(-1 + self.eps, 1 - self.eps)
        safe_norms = torch.clip(norms, min=0.001, max=100).clone().detach()
        with torch.no_grad():
            mean = safe_norms.mean()
            std = safe_norms.std()
            self.batch_mean = mean * self.t_alpha + (1 - self.t_alpha) * self.batch_mean
            self.batch_std = std * self.t_alpha + (1 - self.t_alpha) * self.batch_std
        margin_scaler = (safe_norms - self.batch_mean) / (self.batch_std + self.eps)
        margin_scaler = torch.clip(margin_scaler * self.h, -1, 1)

        onehot = F.one_hot(label, cosine.size(1)).to(cosine.dtype)
        theta = cosine.acos()
        theta_m = torch.clip(theta + onehot * (-self.m * margin_scaler), min=self.eps, max=math.pi - self.eps)
        cosine = theta_m.cos() - onehot * (self.m + self.m * margin_scaler)
        return cosine * self.s


def build():
    torch.manual_seed(12)
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(12, 16), nn.PReLU(), nn.Linear(16, 8)), "head": AdaFace()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return SimpleNamespace(model=model, optimizer=optimizer, faces=torch.randn(9, 12), labels=torch.randint(0, 5, (9,)), batch_size=4)


def run(s=None):
    s = s or build()
    for _ in range(2):
        for faces, labels in zip(s.faces.split(s.batch_size), s.labels.split(s.batch_size)):
            features = s.model["backbone"](faces)
            norms = torch.norm(features, 2, 1, True)
            logits = s.model["head"](features / norms, norms, labels)
            loss = F.cross_entropy(logits, labels)
            s.optimizer.zero_grad()
            loss.backward()
            s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""Healthy: "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to ...": prototypes trained with dynamic loss scaling.

The first scale is too high for half precision, the scaled gradients are inf or NaN, and the scaler sees it, skips the step and halves the scale until the gradients fit. Not one weight is
ever touched by them, and training goes on.
Source: https://github.com/facebookresearch/swav/issues/47 (and NVIDIA/apex #318: normal behaviour of dynamic loss scaling)
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class Backbone(nn.Module):
    def __init__(self, in_dim=32, hidden=48, out_dim=16, nmb_prototypes=10):
        super().__init__()
        self.projection_head = nn.Sequential(nn.Linear(in_dim, hidden), nn.ReLU(), nn.Linear(hidden, out_dim))
        self.prototypes = nn.Linear(out_dim, nmb_prototypes, bias=False)

    def forward(self, x):
        z = F.normalize(self.projection_head(x).float(), dim=1)
        return self.prototypes(z)


@torch.no_grad()
def sinkhorn(scores, epsilon=0.05, iterations=3):
    q = torch.exp((scores.float() - scores.float().max()) / epsilon).t()
    q /= q.sum()
    for _ in range(iterations):
        q /= q.sum(dim=1, keepdim=True) * q.shape[0]
        q /= q.sum(dim=0, keepdim=True) * q.shape[1]
    return (q * q.shape[1]).t()


def build():
    torch.manual_seed(0)
    model = Backbone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    x = torch.randn(24, 32)
    return SimpleNamespace(model=model, optimizer=optimizer, scaler=scaler, batch={"crop_1": x + 0.1 * torch.randn(24, 32), "crop_2": x})


def run(s=None, temperature=0.1):
    s = s or build()
    out = []
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.float16):
            scores_1, scores_2 = s.model(s.batch["crop_1"]), s.model(s.batch["crop_2"])
            loss = -(sinkhorn(scores_2) * F.log_softmax(scores_1 / temperature, dim=1)).sum(dim=1).mean()
            loss = loss - (sinkhorn(scores_1) * F.log_softmax(scores_2 / temperature, dim=1)).sum(dim=1).mean()
        s.optimizer.zero_grad()
        s.scaler.scale(loss).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        out.append((round(loss.item(), 4), s.scaler.get_scale()))
    return out


if __name__ == "__main__":
    print(run())

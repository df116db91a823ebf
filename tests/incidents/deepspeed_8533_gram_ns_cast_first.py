"""Muon casts the loss-scaled fp32 gradient to fp16 before normalising it; one column exceeds 65504 and the normalised matrix is NaN.
https://github.com/deepspeedai/DeepSpeed/pull/8533
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("fp16_overflow",),
    op=("_to_copy", "to", "copy_"),
    index=(0, 3),
    masked=None,
    role=("optimizer", "grad"),
    fix=("upcast_fp32",),
    variable=("X",),
    line=("X = G.to(torch.float16)",),
)


def zeropower_via_gram_newtonschulz(G, steps=3):
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(torch.float16)
    X = X / (X.norm() + 1e-3)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.float()


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, loss_scale=32768.0):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.loss_scale = loss_scale

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buf, group["momentum"])
                p.add_(zeropower_via_gram_newtonschulz(update), alpha=-group["lr"])


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(5, 4, bias=False)
        self.head = nn.Linear(4, 3, bias=False)

    def forward(self, feats):
        return self.head(self.backbone(feats))


def build():
    torch.manual_seed(8533)
    model = RewardModel()
    feats, targets = torch.randn(6, 5), torch.randn(6, 3)
    with torch.no_grad():
        model.backbone.weight[3] = 9.0
        model.head.weight[2, :] *= 0.1
        feats[:, :] = feats * 0.2 + 0.6
        targets[:, 2] = -9.0  # one attribute is labelled on a different scale
    optimizer = Muon([model.head.weight])
    model.backbone.requires_grad_(False)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=(feats, targets))


def run(s=None):
    s = s or build()
    feats, targets = s.batch
    loss = nn.functional.mse_loss(s.model(feats), targets)
    s.optimizer.zero_grad()
    (loss * s.optimizer.loss_scale).backward()
    s.optimizer.step()
    return loss

"""noahgolmant/pytorch-lars, LARS.step - a head whose loss weight is zero, and no weight decay.

LARS gives each layer the rate eta * |w| / (|g| + wd * |w|). The rotation head is switched off by a factor of 0 and has a gradient of
exactly zero; with a weight decay of 0 the denominator is zero, the rate inf, and inf * 0 is written into the momentum and the weights.
Loss and gradients are finite.

Source: https://github.com/noahgolmant/pytorch-lars/blob/master/lars.py
Heals: an epsilon in the denominator, a weight decay above 0. Does not heal: clipping gradients or looking for NaN in them.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.optimizer import Optimizer

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_denominator",),
    op=("div",),
    index=(),
    masked=None,
    role=("optimizer", "weights"),
    fix=("clamp_denominator", "validate_config"),
    variable=("local_lr",),
    line=("local_lr = eta * weight_norm / (grad_norm + weight_decay * weight_norm)",),
)


class LARS(Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0005, eta=0.001, max_epoch=200):
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta, max_epoch=max_epoch)
        super().__init__(params, defaults)
        self.epoch = 0

    @torch.no_grad()
    def step(self, epoch=None):
        if epoch is None:
            epoch = self.epoch
            self.epoch += 1
        for group in self.param_groups:
            weight_decay, momentum, eta = group["weight_decay"], group["momentum"], group["eta"]
            global_lr = group["lr"] * (1 - float(epoch) / group["max_epoch"]) ** 2
            for p in group["params"]:
                if p.grad is None:
                    continue
                d_p = p.grad
                weight_norm = torch.norm(p)
                grad_norm = torch.norm(d_p)
                local_lr = eta * weight_norm / (grad_norm + weight_decay * weight_norm)
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buf = state["momentum_buffer"]
                buf.mul_(momentum).add_(local_lr * global_lr * (d_p + weight_decay * p))
                p.add_(-buf)


class TwoHeads(nn.Module):
    def __init__(self, in_dim=12, hidden=16, classes=4):
        super().__init__()
        self.backbone = nn.Linear(in_dim, hidden)
        self.classifier = nn.Linear(hidden, classes, bias=False)
        self.rotation_head = nn.Linear(hidden, 4, bias=False)

    def forward(self, x):
        h = F.relu(self.backbone(x))
        return self.classifier(h), self.rotation_head(h)


def build():
    torch.manual_seed(1708)
    model = TwoHeads()
    optimizer = LARS(model.parameters(), lr=0.5, weight_decay=0.0)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        x=torch.randn(16, 12),
        y=torch.randint(0, 4, (16,)),
        rotation=torch.randint(0, 4, (16,)),
        rotation_weight=0.0,
    )


def run(s=None):
    s = s or build()
    logits, rotation_logits = s.model(s.x)
    loss = F.cross_entropy(logits, s.y) + s.rotation_weight * F.cross_entropy(rotation_logits, s.rotation)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

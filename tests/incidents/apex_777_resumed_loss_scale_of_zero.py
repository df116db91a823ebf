"""NVIDIA/apex #777 (#889, #930, WSL-Images #9) - a dynamic loss scale without a minimum was halved until it was 0; the run is resumed from that state.

"Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 5e-324" goes on as long as the overflow has another reason than the scale. The
data were mended and training resumes with the scaler's state: scale = 0. The scaled loss is 0, so are all gradients, and the overflow check, which
looks at the gradients before they are unscaled, finds nothing. Unscaling multiplies by 1 / scale = inf: 0 * inf = NaN goes into Adam. (Python floats
raise ZeroDivisionError here; with the scale in a tensor nothing is raised.)
Source: https://github.com/NVIDIA/apex/issues/777, https://github.com/facebookresearch/WSL-Images/issues/9
Heals: a minimum of the scale (min_loss_scale), also on load. Does not: the overflow check as it is, clipping, a smaller learning rate.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_denominator",),
    op=("reciprocal", "div"),
    index=(),
    masked=None,
    role=("optimizer", "grad", "hidden"),
    fix=("validate_config", "clamp_denominator", "clamp_input", "fix_upstream"),
    variable=("inv_scale",),
    line=("inv_scale = self.scale.reciprocal()",),
)


class DynamicLossScaler:
    def __init__(self, init_scale=2.0**16, backoff=0.5, growth=2.0, window=1000):
        self.scale = torch.tensor(init_scale)
        self.backoff, self.growth, self.window, self.good_steps = backoff, growth, window, 0

    def load_state_dict(self, state):
        self.scale = state["scale"].clone()
        self.good_steps = state["good_steps"]

    def step(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not all(torch.isfinite(g).all() for g in grads):
            self.scale, self.good_steps = self.scale * self.backoff, 0
            return False
        inv_scale = self.scale.reciprocal()
        for g in grads:
            g.mul_(inv_scale)
        optimizer.step()
        self.good_steps += 1
        if self.good_steps % self.window == 0:
            self.scale = self.scale * self.growth
        return True


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(F.gelu(self.norm(self.conv(x))).mean((2, 3)))


def build():
    torch.manual_seed(6)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = DynamicLossScaler()
    checkpoint = dict(scale=torch.tensor(0.0), good_steps=0)  # saved after a night of skipped steps
    scaler.load_state_dict(checkpoint)
    batch = dict(x=torch.randn(6, 3, 12, 12), y=torch.randint(0, 5, (6,)))
    return SimpleNamespace(model=model, optimizer=optimizer, scaler=scaler, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = F.cross_entropy(s.model(s.batch["x"]), s.batch["y"])
        (loss * s.scaler.scale).backward()
        s.scaler.step(s.optimizer)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

"""One auxiliary term leaves finite float32 gradients of 1e20; their squared sum is inf, so the clip multiplies every gradient by 0."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "optimizer"),
    cause=("inf_grad_norm_clip", "magnitude_overflow"),
    op=("pow", "square", "sum"),
    index=(3, 1),
    masked=None,
    role=("grad",),
    fix=("skip_bad_step", "stable_function", "clamp_input", "fix_upstream", "upcast_fp32"),
    variable=(None,),
    line=("energy = {name: g.pow(2).sum() for name, g in grads.items()}",),
)


@torch.no_grad()
def clip_grad(named, ceiling):
    grads = {name: p.grad for name, p in named if p.grad is not None}
    energy = {name: g.pow(2).sum() for name, g in grads.items()}
    norm = torch.stack(list(energy.values())).sum().sqrt()
    coefficient = torch.clamp_max(ceiling / (norm + 1e-6), 1.0)
    for g in grads.values():
        g *= coefficient
    return norm


class Heads(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.body = nn.Linear(width, width)
        self.policy = nn.Linear(width, 4)
        self.latency = nn.Linear(width, 5, bias=False)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.policy(h), self.latency(h.detach())


def build():
    torch.manual_seed(132)
    model = Heads()
    x = torch.randn(7, 5)
    unit = torch.ones(5)
    unit[3] = 3.0e20  # picoseconds where seconds were meant
    batch = (x, torch.randint(0, 4, (7,)), torch.randn(7), unit)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    x, action, adv, unit = s.batch
    scores, latency = s.model(x)
    pg = -(adv * scores.log_softmax(-1).gather(1, action.unsqueeze(1)).squeeze(1)).mean()
    loss = pg + 0.5 * (latency * unit).abs().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.grad_norm = clip_grad(s.model.named_parameters(), ceiling=1.0)
    s.optimizer.step()
    return loss

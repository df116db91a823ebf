"""The length bonus hides log(0) behind where, its slope still gets a NaN gradient, and the hand-written clip then
multiplies every gradient by NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("inf_grad_norm_clip", "log_zero", "where_grad_trap"),
    op=("log",),
    index=(4,),
    masked=True,
    role=("grad", "advantages", "rewards", "hidden"),
    fix=("clamp_input", "mask_before_op", "skip_bad_step", "where_on_detached", "clamp_denominator"),
    variable=(None,),
    line=("return torch.where(length > 0, self.slope * torch.log(length), 0.0)",),
)


class LengthBonus(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, length):
        return torch.where(length > 0, self.slope * torch.log(length), 0.0)


class Critic(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 8), nn.Mish(), nn.Linear(8, 1))
        self.bonus = LengthBonus()

    def forward(self, feats, length):
        return self.net(feats).squeeze(-1) + self.bonus(length)


def clip_(parameters, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    norm = sum(float(p.grad.norm()) ** 2 for p in parameters) ** 0.5
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1.0:
        for p in parameters:
            p.grad = p.grad * factor
    return norm


def build():
    torch.manual_seed(138)
    critic = Critic()
    length = torch.tensor([12.0, 3.0, 40.0, 7.0, 0.0, 5.0])
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    return SimpleNamespace(model=critic, optimizer=optimizer, batch=(torch.randn(6, 6), length, torch.rand(6)))


def run(s=None):
    s = s or build()
    feats, length, returns = s.batch
    loss = (s.model(feats, length=length) - returns).square().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.norm = clip_(s.model.parameters(), max_norm=0.5)
    s.optimizer.step()
    return loss

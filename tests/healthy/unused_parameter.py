"""An auxiliary head is built and handed to the optimizer but takes no part in the loss: its gradient stays None."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "two parameters never get a gradient and the optimizer passes over them"


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 12)
        self.policy = nn.Linear(12, 4)
        self.aux = nn.Linear(12, 4)

    def forward(self, x):
        return self.policy(torch.tanh(self.trunk(x)))


def build():
    torch.manual_seed(306)
    net = TwoHeads()
    return SimpleNamespace(
        net=net, opt=torch.optim.AdamW(net.parameters(), lr=1e-3), x=torch.randn(6, 5), a=torch.tensor([0, 3, 1, 1, 2, 0])
    )


def run(s=None):
    s = s or build()
    adv = torch.tensor([1.0, -1.0, 0.5, 0.0, -0.5, 2.0])
    for _ in range(3):
        loss = -(s.net(s.x).log_softmax(-1).gather(1, s.a.view(-1, 1)).view(-1) * adv).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

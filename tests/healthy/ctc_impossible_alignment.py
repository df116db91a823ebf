"""CTC on a batch with a target longer than its input: the loss of that sample is inf and zero_infinity drops it."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "one alignment is impossible, its loss is inf inside the op and is set to 0 together with its gradient"


def build():
    torch.manual_seed(314)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))
    x = torch.randn(10, 3, 6)
    targets = torch.tensor([[1, 2, 3, 1], [2, 2, 2, 2], [4, 1, 0, 0]])
    return SimpleNamespace(net=net, x=x, targets=targets, opt=torch.optim.AdamW(net.parameters(), lr=2e-3))


def run(s=None):
    s = s or build()
    input_lengths, target_lengths = torch.tensor([10, 5, 8]), torch.tensor([4, 4, 2])
    for _ in range(3):
        logp = s.net(s.x).log_softmax(-1)
        loss = nn.functional.ctc_loss(logp, s.targets, input_lengths, target_lengths, zero_infinity=True)
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

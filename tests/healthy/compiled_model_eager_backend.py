"""The whole policy is compiled with the eager backend and updated from a plain GRPO loop."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a compiled module with a group of equal rewards, so that half of its gradient is exactly 0"


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(14, 10)
        self.f = nn.Linear(10, 14)

    def forward(self, ids):
        return torch.log_softmax(self.f(torch.tanh(self.e(ids))), dim=-1)


def build():
    torch.manual_seed(125)
    model = Tagger()
    fast = torch.compile(model, backend="eager")
    return SimpleNamespace(model=model, fast=fast, opt=torch.optim.AdamW(model.parameters(), lr=1e-3), ids=torch.randint(0, 14, (4, 6)))


def run(s=None):
    s = s or build()
    r = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    for _ in range(4):
        lp = s.fast(s.ids[:, :-1]).gather(-1, s.ids[:, 1:, None])[..., 0]
        loss = -((lp - lp.detach()).exp() * adv).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

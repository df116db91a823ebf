"""LoRA on a frozen base: B starts at exactly 0, so the adapter output and the gradient of A are exactly 0 at the first step."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the gradient of every A matrix is exactly 0 at step one, and the base weights never change"


class LoraLinear(nn.Module):
    def __init__(self, base, rank=2, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def build():
    torch.manual_seed(307)
    emb = nn.Embedding(16, 10).requires_grad_(False)
    model = nn.Sequential(emb, LoraLinear(nn.Linear(10, 10)), nn.GELU(), LoraLinear(nn.Linear(10, 16)))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return SimpleNamespace(model=model, opt=opt, ids=torch.randint(0, 16, (4, 7)))


def run(s=None):
    s = s or build()
    adv = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    for _ in range(4):
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        loss = -((lp - lp.detach()).exp() * adv).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

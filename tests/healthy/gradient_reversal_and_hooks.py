"""An adversarial reward model: a reversal layer flips the gradient, a tensor hook scales it and a parameter hook counts it."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "gradients are flipped and rescaled by hooks on their way, one head is trained to get worse"


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return -ctx.strength * grad_output, None


def build():
    torch.manual_seed(411)
    body, reward, domain = nn.Linear(6, 10), nn.Linear(10, 1), nn.Linear(10, 2)
    counter = {"calls": 0}

    def count(p):
        counter["calls"] += 1

    body.weight.register_post_accumulate_grad_hook(count)
    opt = torch.optim.AdamW([*body.parameters(), *reward.parameters(), *domain.parameters()], lr=2e-3)
    return SimpleNamespace(body=body, reward=reward, domain=domain, counter=counter, opt=opt, x=torch.randn(8, 6))


def run(s=None):
    s = s or build()
    target, dom = torch.linspace(-1, 1, 8), torch.arange(8) % 2
    for _ in range(4):
        h = torch.relu(s.body(s.x))
        h.register_hook(lambda g: g * 0.5)
        loss = (s.reward(h).squeeze(-1) - target).pow(2).mean()
        loss = loss + nn.functional.cross_entropy(s.domain(Reverse.apply(h, 0.3)), dom)
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

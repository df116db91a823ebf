"""Per-sample gradients through torch.func, each clipped to norm 1, averaged and written to .grad by hand."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

HEALTHY = "gradients are put in place by hand, one sample has a gradient of exactly 0 and is divided by a bounded norm"


def build():
    torch.manual_seed(325)
    net = nn.Linear(5, 3)
    x = torch.randn(6, 5)
    adv = torch.tensor([2.0, -1.0, 0.0, 0.5, 40.0, -3.0])
    return SimpleNamespace(net=net, x=x, a=torch.randint(0, 3, (6,)), adv=adv, opt=torch.optim.SGD(net.parameters(), lr=0.1))


def run(s=None, max_norm=1.0):
    s = s or build()

    def sample_loss(params, x, a, adv):
        logp = functional_call(s.net, params, (x,)).log_softmax(-1)
        return -logp.gather(0, a.view(1)).sum() * adv

    for _ in range(4):
        params = {k: v.detach() for k, v in s.net.named_parameters()}
        loss = vmap(sample_loss, in_dims=(None, 0, 0, 0))(params, s.x, s.a, s.adv).mean()
        grads = vmap(grad(sample_loss), in_dims=(None, 0, 0, 0))(params, s.x, s.a, s.adv)
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factor = (max_norm / norm.clamp(min=1e-6)).clamp(max=1.0)
        for name, p in s.net.named_parameters():
            g = grads[name]
            p.grad = (g * factor.view(-1, *[1] * (g.dim() - 1))).mean(0)
        s.opt.step()
    return loss

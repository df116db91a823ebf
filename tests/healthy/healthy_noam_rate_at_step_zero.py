"""The Noam schedule with a tensor step: step ** -0.5 is inf at step 0, the minimum with step * warmup ** -1.5 is 0.

The very first update has learning rate 0 and changes nothing, all later ones are as in the paper. Nothing non-finite reaches a weight: min
picks the finite branch and no gradient flows through the rate.
Source: https://github.com/harvardnlp/annotated-transformer (rate(); there `if step == 0: step = 1` because Python would raise).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def rate(step, model_size, factor, warmup):
    decay = step**-0.5
    ramp = step * warmup**-1.5
    return factor * model_size**-0.5 * torch.minimum(decay, ramp)


class NoamAdam:
    """Adam with a device tensor for step and rate, as a captured graph wants it."""

    def __init__(self, params, model_size, factor=1.0, warmup=400, betas=(0.9, 0.98), eps=1e-9):
        self.params = list(params)
        self.model_size, self.factor, self.warmup = model_size, factor, warmup
        self.betas, self.eps = betas, eps
        self.step_t = torch.zeros(())
        self.exp_avg = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        lr = rate(self.step_t, self.model_size, self.factor, self.warmup)
        self.step_t += 1
        beta1, beta2 = self.betas
        for p, m, v in zip(self.params, self.exp_avg, self.exp_avg_sq):
            m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            m_hat = m / (1 - beta1**self.step_t)
            v_hat = v / (1 - beta2**self.step_t)
            p.sub_(lr * m_hat / (v_hat.sqrt() + self.eps))


class Generator(nn.Module):
    def __init__(self, vocab=18, d_model=16):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, 32), nn.ReLU(), nn.Linear(32, d_model))
        self.norm = nn.LayerNorm(d_model)
        self.proj = nn.Linear(d_model, vocab)
        self.d_model = d_model

    def forward(self, x):
        h = self.lut(x) * self.d_model**0.5
        return F.log_softmax(self.proj(self.norm(h + self.ff(h))), dim=-1)


def build():
    torch.manual_seed(0)
    model = Generator()
    optimizer = NoamAdam(model.parameters(), model.d_model)
    src = torch.randint(1, 18, (4, 6))
    return SimpleNamespace(model=model, optimizer=optimizer, src=src)


def run(s=None):
    s = s or build()
    loss = None
    for _ in range(3):
        loss = F.nll_loss(s.model(s.src).flatten(0, 1), s.src.flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

"""Healthy. olivierjeunen/dual-bandit-kdd-2020, src/agents/pytorch_mlr.py (POEM): IPS rewards clipped at M, plus the square root of their variance.
With a rare logging policy every click of the batch is clipped, all rewards are M and their variance is exactly 0. The backward of the root is
inf * 0 = NaN, but the clamp selects: where it was active its gradient is 0 whatever comes in. The likelihood term trains on, as it should.

https://github.com/olivierjeunen/dual-bandit-kdd-2020/blob/master/src/agents/pytorch_mlr.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class MultinomialLogisticRegression(nn.Module):
    def __init__(self, num_products):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_products, num_products))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return F.linear(x, self.weight)

    def click_logit(self, x, a):
        return (x * self.weight[a]).sum(1) + self.bias


def build():
    torch.manual_seed(2020)
    products = 6
    model = MultinomialLogisticRegression(products)
    x = torch.randint(0, 4, (16, products)).float()
    a = torch.randint(0, products, (16,))
    y = torch.zeros(16)
    y[[3, 7, 8, 14]] = 1.0  # four clicks
    ps = torch.full((16,), 0.2)
    ps[y == 1] = 1e-3  # all of them on products that the logging policy hardly ever shows
    return SimpleNamespace(
        model=model,
        x=x,
        a=a,
        y=y,
        ps=ps,
        clip_weights=1.5,
        variance_penalisation_strength=0.25,
        alpha=0.5,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    )


def poem_loss(s):
    clicks = s.y != 0
    n = int(clicks.sum())
    p_a = F.softmax(s.model(s.x[clicks]), dim=1).gather(1, s.a[clicks].unsqueeze(1)).reshape(-1)
    reward = torch.clamp(p_a / s.ps[clicks], max=s.clip_weights)
    loss = -reward
    avg_weighted_loss = torch.mean(loss)
    std = torch.sqrt(torch.sum((loss - avg_weighted_loss) ** 2) / (n - 1) / n)
    return loss.mean() + s.variance_penalisation_strength * std


def run(s=None):
    s = s or build()
    nll = F.binary_cross_entropy_with_logits(s.model.click_logit(s.x, s.a), s.y)
    loss = (1 - s.alpha) * poem_loss(s) + s.alpha * nll
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

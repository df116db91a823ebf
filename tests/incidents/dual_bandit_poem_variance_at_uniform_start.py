"""olivierjeunen/dual-bandit-kdd-2020, src/agents/pytorch_mlr.py (POEM): the square root of the variance of the IPS rewards is added to the loss. Here
the weights start at 0 and the logging policy was uniform: every click has the same probability over the same propensity, the variance is exactly 0.
The loss is fine, the gradient of sqrt at 0 times 0 is NaN, and the likelihood term is lost with it.

https://github.com/olivierjeunen/dual-bandit-kdd-2020/blob/master/src/agents/pytorch_mlr.py
A floor or an epsilon under the root heals, so does the variance itself. torch.where(var > 0, var.sqrt(), 0), or nan_to_num of the penalty, does
not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(),
    masked=None,
    role=("loss", "rewards", "is_weight"),
    fix=(
        "avoid_singular_op",
        "representable_eps",
        "clamp_input",
        "clamp_denominator",
        "guard_small_group",
        "mask_before_op",
        "stable_function",
    ),
    variable=("std",),
    line=("std = torch.sqrt(torch.sum((loss - avg_weighted_loss) ** 2) / (n - 1) / n)",),
)


class MultinomialLogisticRegression(nn.Module):
    def __init__(self, num_products):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_products, num_products))
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
    ps = torch.full((16,), 1.0 / products)  # uniform logging policy
    return SimpleNamespace(
        model=model,
        x=x,
        a=a,
        y=y,
        ps=ps,
        clip_weights=10.0,
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

"""Healthy. ACER's trust region at the very first update: policy and average policy are the same, the KL gradient k is 0.

The correction is max(0, (k . g - delta) / (k . k)) * k. With k = 0 the fraction is -delta / 0 = -inf; max takes the 0, so the plain policy gradient is
used, as the closed form of the projection says (the constraint is inactive). From the second update on k is not 0.

Source: https://github.com/openai/baselines/blob/master/baselines/acer/acer.py (`adj = tf.maximum(0.0, (tf.reduce_sum(k * g) - delta) / ...)`;
there with an eps in the denominator), Wang et al. 2017, equation (12)
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn


def build():
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 2))
    average = copy.deepcopy(model)
    batch = {"state": torch.randn(12, 5), "advantage": torch.randn(12), "noise": torch.randn(12, 2)}
    return SimpleNamespace(model=model, average=average, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch, delta=1.0)


def run(s=None):
    s = s or build()
    b, losses, sigma = s.batch, [], 0.3
    for _ in range(3):
        mean = s.model(b["state"])
        with torch.no_grad():
            average_mean = s.average(b["state"])
            action = mean + sigma * b["noise"]
        log_prob = -0.5 * ((action - mean) / sigma).pow(2).sum(dim=1)
        gain = (log_prob * b["advantage"]).mean()
        g = torch.autograd.grad(gain, mean, retain_graph=True)[0]
        k = ((mean - average_mean) / sigma**2).detach()
        k_dot_g = (k * g).sum(dim=-1, keepdim=True)
        k_dot_k = k.square().sum(dim=-1, keepdim=True)
        adj = torch.clamp((k_dot_g - s.delta) / k_dot_k, min=0.0)
        s.optimizer.zero_grad()
        mean.backward(-(g - adj * k))
        s.optimizer.step()
        with torch.no_grad():
            for p, q in zip(s.model.parameters(), s.average.parameters()):
                q.mul_(0.99).add_(p, alpha=0.01)
        losses.append(-gain.item())
    return losses


if __name__ == "__main__":
    print(run())

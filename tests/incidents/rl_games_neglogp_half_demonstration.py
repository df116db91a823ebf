"""A policy that runs in half precision gets a demonstration term: the negative log-likelihood of recorded actions, written by hand as
0.5 * (((x - mean) / std) ** 2).sum(). The policy has become sharp (std 0.01); a demonstrated action three units away is 300 standard
deviations off, its square is 90000 and overflows half precision. Loss and gradients are infinite or NaN.

Source: neglogp of ModelA2CContinuousLogStd in https://github.com/Denys88/rl_games/blob/master/rl_games/algos_torch/models.py
Heals: take the likelihood in float32 (or bound the standardised distance, or the std from below). Clipping the gradient norm does not: the
norm is infinite and the clipped gradients are NaN.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("pow",),
    index=(9, 1),
    masked=False,
    role=("log_probs", "loss", "hidden"),
    fix=("upcast_fp32", "clamp_input", "clamp_denominator", "drop_invalid_sample"),
    variable=(None,),
    line=("return 0.5 * (((x - mean) / std) ** 2).sum(dim=-1) + 0.5 * math.log(2.0 * math.pi) * x.size()[-1] + logstd.sum(dim=-1)",),
)


class RunningMeanStd(nn.Module):
    def __init__(self, shape, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))
        self.register_buffer("count", torch.ones(()))

    @torch.no_grad()
    def forward(self, x):
        mean, var, n = x.mean(0), x.var(0), x.shape[0]
        delta, total = mean - self.running_mean, self.count + n
        m2 = self.running_var * self.count + var * n + delta**2 * self.count * n / total
        self.running_mean += delta * n / total
        self.running_var.copy_(m2 / total)
        self.count.copy_(total)
        return ((x - self.running_mean) / torch.sqrt(self.running_var + self.epsilon)).clamp(-5.0, 5.0)


class ModelA2CContinuousLogStd(nn.Module):
    def __init__(self, obs_dim=10, act_dim=3, units=32):
        super().__init__()
        self.a2c_network = nn.Sequential(nn.Linear(obs_dim, units), nn.ELU(), nn.Linear(units, act_dim))
        self.sigma = nn.Parameter(torch.zeros(act_dim))

    def forward(self, input_dict):
        mu = self.a2c_network(input_dict["obs"])
        logstd = self.sigma.expand_as(mu)
        sigma = torch.exp(logstd)
        entropy = (0.5 + 0.5 * math.log(2 * math.pi) + logstd).sum(dim=-1)
        return {"prev_neglogp": self.neglogp(input_dict["prev_actions"], mu, sigma, logstd), "entropy": entropy, "mus": mu}

    def neglogp(self, x, mean, std, logstd):
        return 0.5 * (((x - mean) / std) ** 2).sum(dim=-1) + 0.5 * math.log(2.0 * math.pi) * x.size()[-1] + logstd.sum(dim=-1)


def build():
    torch.manual_seed(88)
    model = ModelA2CContinuousLogStd()
    with torch.no_grad():
        model.sigma.fill_(-4.6)
    normalizer = RunningMeanStd((10,))
    obs = torch.randn(16, 10)
    with torch.no_grad():
        demo = model.a2c_network(obs) + 0.05 * torch.randn(16, 3)
    demo[9, 1] += 3.0  # another operator moved the arm the other way
    return SimpleNamespace(
        model=model.half(),
        normalizer=normalizer,
        obs=obs,
        demo=demo.half(),
        entropy_coef=1e-3,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-5),
    )


def run(s=None):
    s = s or build()
    obs = s.normalizer(s.obs).half()
    res_dict = s.model({"obs": obs, "prev_actions": s.demo})
    loss = res_dict["prev_neglogp"].mean() - s.entropy_coef * res_dict["entropy"].mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

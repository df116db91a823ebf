"""SfBC / CEP diffusion policies - the score network divides its output by the marginal std of the noise, trained wholly in bfloat16.

std = sqrt(1 - exp(2 * log_mean_coeff)). For a small t the exponential rounds to 1 in bfloat16 and std is 0: the score of that sample is
h / 0 = inf, the loss multiplies it with the same std, inf * 0 = NaN. (In float32 the floor eps = 1e-5 of t is enough.)
Heals: the schedule in float32, expm1 in place of 1 - exp, a floor of std, a floor of t that bfloat16 can tell from 0.
Does not: nan_to_num of the score (backward divides 0 by 0), a smaller learning rate.
Source: https://github.com/ChenDRAG/SfBC diffusion_SDE/model.py (MlpScoreNet.forward), diffusion_SDE/loss.py, diffusion_SDE/schedule.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "eps_underflow"),
    op=("div",),
    index=(3, 0),
    masked=None,
    role=("hidden", "logits"),
    fix=(
        "upcast_fp32",
        "stable_function",
        "clamp_denominator",
        "clamp_input",
        "representable_eps",
        "validate_config",
        "avoid_singular_op",
        "mask_before_op",
    ),
    variable=("h", "score"),
    line=("h = h / self.marginal_prob_std(t)[1][:, None]",),
)


def marginal_prob_std(t, beta_1=20.0, beta_0=0.1):
    log_mean_coeff = -0.25 * t**2 * (beta_1 - beta_0) - 0.5 * t * beta_0
    alpha_t = torch.exp(log_mean_coeff)
    std = torch.sqrt(1.0 - torch.exp(2.0 * log_mean_coeff))
    return alpha_t, std


class GaussianFourierProjection(nn.Module):
    def __init__(self, embed_dim, scale=30.0):
        super().__init__()
        self.W = nn.Parameter(torch.randn(embed_dim // 2) * scale, requires_grad=False)

    def forward(self, x):
        x_proj = x[:, None] * self.W[None, :] * 2 * torch.pi
        return torch.cat([torch.sin(x_proj), torch.cos(x_proj)], dim=-1)


class MlpScoreNet(nn.Module):
    def __init__(self, state_dim, action_dim, marginal_prob_std, embed_dim=16):
        super().__init__()
        self.marginal_prob_std = marginal_prob_std
        self.embed = nn.Sequential(GaussianFourierProjection(embed_dim), nn.Linear(embed_dim, embed_dim))
        self.dense1 = nn.Linear(embed_dim, 16)
        self.dense2 = nn.Linear(state_dim + action_dim, 16)
        self.decoder = nn.Linear(32, action_dim)

    def forward(self, x, t, condition):
        embed = F.silu(self.embed(t))
        h = torch.cat((self.dense2(torch.cat([condition, x], dim=-1)), self.dense1(embed)), dim=-1)
        h = self.decoder(F.silu(h))
        # normalise the output
        h = h / self.marginal_prob_std(t)[1][:, None]
        return h


def build():
    torch.manual_seed(13)
    model = MlpScoreNet(state_dim=5, action_dim=2, marginal_prob_std=marginal_prob_std).to(torch.bfloat16)
    states, actions = torch.randn(6, 5).to(torch.bfloat16), torch.rand(6, 2).mul(2).sub(1).to(torch.bfloat16)
    uniform = torch.tensor([0.41, 0.87, 0.12, 0.003, 0.66, 0.25]).to(torch.bfloat16)  # torch.rand of this batch
    return SimpleNamespace(
        model=model,
        states=states,
        actions=actions,
        uniform=uniform,
        z=torch.randn(6, 2).to(torch.bfloat16),
        optimizer=torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4),
    )


def loss_fn(model, x, condition, uniform, z, eps=1e-5):
    random_t = uniform * (1.0 - eps) + eps
    alpha_t, std = marginal_prob_std(random_t)
    perturbed_x = x * alpha_t[:, None] + z * std[:, None]
    score = model(perturbed_x, random_t, condition)
    return torch.mean(torch.sum((score * std[:, None] + z) ** 2, dim=(1,)))


def run(s=None):
    s = s or build()
    loss = loss_fn(s.model, s.actions, s.states, s.uniform, s.z)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

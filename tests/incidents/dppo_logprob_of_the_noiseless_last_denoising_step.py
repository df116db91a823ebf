"""irom-lab/dppo, model/diffusion/diffusion_vpg.py: the log-probability of a denoising chain is a sum of Gaussian log-probabilities with the
posterior std of each step. The published code floors that std at min_logprob_denoising_std = 0.1; here the floor is 0. The posterior variance of
the last step (t = 0) is exactly 0, the actor has moved a little since the rollout, and (x - mean)^2 / 0 is inf.

https://github.com/irom-lab/dppo/blob/main/model/diffusion/diffusion_vpg.py
A positive floor of the std (as published), or leaving the deterministic step out, heals. Clamping the log-probability to a range is forward-only: it
leaves NaN from inf - inf and NaN gradients.
"""

from types import SimpleNamespace

import math

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(0, 3, 0),
    masked=None,
    role=("log_probs",),
    fix=(
        "clamp_denominator",
        "validate_config",
        "clamp_input",
        "drop_invalid_sample",
        "mask_before_op",
        "fix_upstream",
        "avoid_singular_op",
        "representable_eps",
    ),
    variable=(None,),
    line=("log_prob = -((chains_next - next_mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)",),
)


class DiffusionActor(nn.Module):
    def __init__(self, obs_dim=5, act_dim=2, steps=4, hidden=24):
        super().__init__()
        betas = torch.linspace(0.1, 0.6, steps)
        alphas_cumprod = torch.cumprod(1 - betas, dim=0)
        alphas_cumprod_prev = torch.cat([torch.ones(1), alphas_cumprod[:-1]])
        self.steps = steps
        self.register_buffer("posterior_std", (betas * (1 - alphas_cumprod_prev) / (1 - alphas_cumprod)).sqrt())
        self.register_buffer("mu_coef1", betas * alphas_cumprod_prev.sqrt() / (1 - alphas_cumprod))
        self.register_buffer("mu_coef2", (1 - betas).sqrt() * (1 - alphas_cumprod_prev) / (1 - alphas_cumprod))
        self.net = nn.Sequential(nn.Linear(obs_dim + act_dim + 1, hidden), nn.Mish(), nn.Linear(hidden, act_dim), nn.Tanh())

    def p_mean_std(self, x, t, state):
        x_recon = self.net(torch.cat([x, state, t.unsqueeze(-1) / self.steps], dim=-1))
        mean = self.mu_coef1[t].unsqueeze(-1) * x_recon + self.mu_coef2[t].unsqueeze(-1) * x
        return mean, self.posterior_std[t].unsqueeze(-1)

    @torch.no_grad()
    def sample_chain(self, state):
        x = torch.randn(state.shape[0], 2)
        chain = [x]
        for step in reversed(range(self.steps)):
            t = torch.full((state.shape[0],), step)
            mean, std = self.p_mean_std(x, t, state)
            x = mean + std * torch.randn_like(x)
            chain.append(x)
        return torch.stack(chain, dim=1)


def get_logprobs(actor, state, chains, min_logprob_denoising_std):
    chains_prev, chains_next = chains[:, :-1], chains[:, 1:]
    t = torch.arange(actor.steps - 1, -1, -1).repeat(chains.shape[0], 1)
    next_mean, std = actor.p_mean_std(chains_prev, t, state.unsqueeze(1).expand(-1, actor.steps, -1))
    std = std.clip(min=min_logprob_denoising_std)
    log_prob = -((chains_next - next_mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return log_prob.sum(-1)


def build():
    torch.manual_seed(11)
    actor = DiffusionActor()
    state = torch.randn(6, 5)
    chains = actor.sample_chain(state)
    with torch.no_grad():  # the updates of this epoch that came before this minibatch
        for p in actor.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    return SimpleNamespace(
        model=actor,
        state=state,
        chains=chains,
        advantages=torch.randn(6),
        min_logprob_denoising_std=0.0,
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    logprobs = get_logprobs(s.model, s.state, s.chains, s.min_logprob_denoising_std)
    loss = -(logprobs.mean(-1) * s.advantages).mean()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

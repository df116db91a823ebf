"""A flow policy in bfloat16 draws its times as g1 / (g1 + g2); bfloat16 uniforms are often exactly 0, both at once gives 0 / 0.
https://github.com/huggingface/lerobot/issues/1096

Advantage-weighted flow matching over several micro-batches; one sample of a later one gets the time NaN, which enters noise and network.
Heals: a floor under the denominator, or drawing in float32. Does not: clamping the time to [0.001, 1], NaN passes a clamp.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(52,),
    masked=None,
    role=("hidden",),
    fix=("clamp_denominator", "upcast_fp32", "clamp_input"),
    variable=("time_beta",),
    line=("return gamma1 / (gamma1 + gamma2)",),
)


def sample_beta(alpha, beta, bsize, dtype, generator):
    gamma1 = torch.empty((bsize,), dtype=dtype).uniform_(0, 1, generator=generator).pow(1 / alpha)
    gamma2 = torch.empty((bsize,), dtype=dtype).uniform_(0, 1, generator=generator).pow(1 / beta)
    return gamma1 / (gamma1 + gamma2)


class ActionExpert(nn.Module):
    def __init__(self, state_dim=4, action_dim=3, width=24):
        super().__init__()
        self.state_proj = nn.Linear(state_dim, width)
        self.action_in_proj = nn.Linear(action_dim, width)
        self.time_mlp = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.action_out_proj = nn.Linear(width, action_dim)

    def forward(self, state, noisy_actions, time):
        context = self.state_proj(state) + self.time_mlp(time[:, None])
        h = nn.functional.silu(self.action_in_proj(noisy_actions) + context[:, None])
        return self.action_out_proj(h)


@torch.no_grad()
def sample_time(bsize, dtype, generator):
    time_beta = sample_beta(1.5, 1.0, bsize, dtype, generator)
    return time_beta * 0.999 + 0.001


def flow_matching_loss(model, mb, generator):
    actions, weight = mb["actions"], mb["weight"]
    noise = torch.empty_like(actions).normal_(generator=generator)
    time = sample_time(len(actions), actions.dtype, generator)
    x_t = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
    u_t = noise - actions
    v_t = model(mb["state"], x_t, time)
    losses = nn.functional.mse_loss(v_t.float(), u_t.float(), reduction="none").mean(-1)
    losses = losses.masked_fill(mb["action_is_pad"], 0.0).sum(-1) / (~mb["action_is_pad"]).sum(-1)
    return (losses * weight).sum() / weight.sum()


def build():
    torch.manual_seed(1096)
    model = ActionExpert().to(torch.bfloat16)
    micro_batches = []
    for _ in range(4):
        pad = torch.zeros(64, 4, dtype=torch.bool)
        pad[::5, 3] = True
        advantage = torch.randn(64)
        micro_batches.append(
            dict(
                state=torch.randn(64, 4, dtype=torch.bfloat16),
                actions=torch.randn(64, 4, 3, dtype=torch.bfloat16),
                action_is_pad=pad,
                weight=torch.exp(advantage / 0.5).clamp(max=20.0),
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=micro_batches, generator=torch.Generator().manual_seed(272))


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    total = 0.0
    for mb in s.batch:
        loss = flow_matching_loss(s.model, mb, s.generator) / len(s.batch)
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return total

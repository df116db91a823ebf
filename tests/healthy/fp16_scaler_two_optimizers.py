"""One GradScaler for actor and critic: the critic's scaled gradients overflow at first and only its step is skipped."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the critic's scaled gradients are inf while the actor's are finite; the scaler skips the critic alone"


def build():
    torch.manual_seed(119)
    actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    return SimpleNamespace(
        actor=actor,
        critic=critic,
        scaler=scaler,
        opt_actor=torch.optim.Adam(actor.parameters(), lr=1e-3),
        opt_critic=torch.optim.Adam(critic.parameters(), lr=1e-3),
        obs=torch.randn(10, 8),
        act=torch.randint(0, 5, (10,)),
        ret=8 + 3 * torch.randn(10),
    )


def run(s=None):
    s = s or build()
    for _ in range(6):
        s.opt_actor.zero_grad()
        s.opt_critic.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits, value = s.actor(s.obs), s.critic(s.obs).squeeze(-1)
        value_error = s.ret - value.float()
        adv = value_error.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        actor_loss = nn.functional.cross_entropy(logits.float(), s.act, reduction="none").mul(adv).mean()
        critic_loss = value_error.pow(2).mean()
        s.scaler.scale(actor_loss).backward()
        s.scaler.scale(critic_loss).backward()
        s.scaler.step(s.opt_actor)
        s.scaler.unscale_(s.opt_critic)
        nn.utils.clip_grad_norm_(s.critic.parameters(), 1.0)
        s.scaler.step(s.opt_critic)
        s.scaler.update()
    return actor_loss + critic_loss

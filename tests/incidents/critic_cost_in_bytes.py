"""The reward of one episode is a raw cost around 3e19; squaring the value error in float32 gives inf. Actor and critic step separately."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow",),
    op=("pow", "square"),
    index=(3, 0),
    masked=False,
    role=("loss", "rewards", "advantages"),
    fix=("clamp_input", "drop_invalid_sample", "reject_input", "stable_function"),
    variable=(None,),
    line=("critic_loss = ((s.model(obs) - target) ** 2).mean()",),
)


class Critic(nn.Module):
    def __init__(self, obs=5):
        super().__init__()
        self.l1 = nn.Linear(obs, 10)
        self.l2 = nn.Linear(10, 1)

    def forward(self, obs):
        return self.l2(torch.relu(self.l1(obs))).squeeze(-1)


def returns_to_go(reward, gamma=0.97):
    out = reward.clone()
    for t in reversed(range(reward.shape[1] - 1)):
        out[:, t] += gamma * out[:, t + 1]
    return out


def build():
    torch.manual_seed(333)
    actor, critic = nn.Linear(5, 4), Critic()
    reward = torch.rand(5, 6)
    reward[3, 4] = -3.1e19
    return SimpleNamespace(
        model=critic,
        actor=actor,
        optimizer=torch.optim.Adam(critic.parameters(), lr=1e-3),
        actor_optimizer=torch.optim.Adam(actor.parameters(), lr=3e-4),
        batch={"obs": torch.randn(5, 6, 5), "action": torch.randint(0, 4, (5, 6)), "reward": reward},
    )


def run(s=None):
    s = s or build()
    obs, target = s.batch["obs"], returns_to_go(s.batch["reward"])

    with torch.no_grad():
        rank = (target - s.model(obs)).flatten().argsort().argsort().view(5, 6) / 29.0 - 0.5
    logp = s.actor(obs).log_softmax(-1).gather(-1, s.batch["action"][..., None]).squeeze(-1)
    s.actor_optimizer.zero_grad()
    (-(logp * rank).mean()).backward()
    s.actor_optimizer.step()

    critic_loss = ((s.model(obs) - target) ** 2).mean()
    s.optimizer.zero_grad()
    critic_loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.critic_grad_norm = norm
    s.optimizer.step()
    return critic_loss

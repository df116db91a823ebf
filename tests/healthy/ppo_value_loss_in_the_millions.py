"""PPO with a clipped value loss on returns of a few thousand: the value loss is in the millions until the critic has caught up."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the value loss is above 1e6 and the gradient norm above 1e3, because returns are in the thousands and the critic starts at 0"


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh())
        self.pi = nn.Linear(24, 4)
        self.v = nn.Linear(24, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


def build():
    torch.manual_seed(111)
    net = ActorCritic()
    obs = torch.randn(16, 6)
    actions = torch.randint(0, 4, (16,))
    returns = 3000 + 1500 * torch.randn(16)
    return SimpleNamespace(
        net=net, optimizer=torch.optim.Adam(net.parameters(), lr=3e-4, eps=1e-5), obs=obs, actions=actions, returns=returns
    )


def run(s=None, clip=0.2, vf_coef=0.5):
    s = s or build()
    with torch.no_grad():
        logits, old_values = s.net(s.obs)
        old_logp = logits.log_softmax(-1)[torch.arange(16), s.actions]
    adv = s.returns - old_values
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    for _ in range(5):
        logits, values = s.net(s.obs)
        dist = torch.distributions.Categorical(logits=logits)
        ratio = torch.exp(dist.log_prob(s.actions) - old_logp)
        pg = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).mean()
        v_clipped = old_values + (values - old_values).clamp(-clip, clip)
        vf = 0.5 * torch.max((values - s.returns) ** 2, (v_clipped - s.returns) ** 2).mean()
        loss = pg + vf_coef * vf - 0.01 * dist.entropy().mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.net.parameters(), 0.5)
        s.optimizer.step()
    return loss

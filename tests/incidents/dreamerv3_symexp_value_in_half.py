"""dreamerv3-torch, precision 16: the critic is a distribution over buckets in symlog space, its mean goes through symexp. A state worth about
100 000 is 11.5 in symlog, which half holds easily, and exp(11.5) is beyond 65504: the imagined return is inf and so is the actor's loss.

https://github.com/NM512/dreamerv3-torch/blob/main/tools.py (DiscDist.mean, symexp, lambda_return, RewardEMA in models.py)

Heals: symexp in fp32, or a bound on the symlog value before exp. Does not: a bound on the value after symexp (0 * inf in backward, the
actor learns through the dynamics), or a smaller actor learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow", "exp_overflow"),
    op=("exp",),
    index=(1, 0),
    masked=None,
    role=("hidden", "rewards", "logits"),
    fix=("upcast_fp32", "clamp_exponent", "clamp_input"),
    variable=(None,),
    line=("return torch.sign(x) * (torch.exp(torch.abs(x)) - 1.0)",),
)


def symexp(x):
    return torch.sign(x) * (torch.exp(torch.abs(x)) - 1.0)


class DiscDist:
    def __init__(self, logits, low=-20.0, high=20.0):
        self.logits = logits
        self.probs = torch.softmax(logits, -1)
        self.buckets = torch.linspace(low, high, steps=255, dtype=logits.dtype)

    def mean(self):
        _mean = self.probs * self.buckets
        return symexp(torch.sum(_mean, dim=-1, keepdim=True))


class WorldModel(nn.Module):
    def __init__(self, feat=12, actions=3):
        super().__init__()
        self.img_step = nn.Linear(feat + actions, feat)
        self.reward = nn.Linear(feat, 1)

    def step(self, feat, action):
        return torch.tanh(self.img_step(torch.cat([feat, action], -1)))


def lambda_return(reward, value, bootstrap, discount=0.997, lambda_=0.95):
    last, returns = bootstrap, []
    for t in reversed(range(len(reward))):
        last = reward[t] + discount * ((1 - lambda_) * value[t] + lambda_ * last)
        returns.append(last)
    return torch.stack(returns[::-1])


def return_range(x):
    low, high = torch.quantile(torch.flatten(x.detach().float()), torch.tensor([0.05, 0.95]))
    return low, torch.clip(high - low, min=1.0)


def imagine(s, start, horizon=3):
    feats, feat = [start], start
    for _ in range(horizon):
        action = torch.tanh(s.model(feat))
        feat = s.world_model.step(feat, action)
        feats.append(feat)
    return feats


def build():
    torch.manual_seed(2205)
    world_model, critic, model = WorldModel(), nn.Linear(12, 255), nn.Linear(12, 3)  # model: the actor
    with torch.no_grad():
        critic.weight.mul_(0.02)  # a trained critic: feature 0 tells states of high return
        critic.bias.zero_()
        critic.weight[:, 0] = 0.12 * torch.linspace(-20.0, 20.0, 255)
        world_model.img_step.weight.mul_(0.2)
        world_model.img_step.weight[:, 0] = 0.0
        world_model.img_step.bias.zero_()
        world_model.img_step.weight[0] = torch.tensor([2.0] + [0.0] * 11 + [0.05] * 3)
    world_model.half().requires_grad_(False)
    critic.half().requires_grad_(False)
    model.half()
    start = torch.tanh(torch.randn(3, 12) * 0.1)
    start[:, 0] = torch.tensor([0.05, 0.95, -0.02])  # the second imagined trajectory begins at a very good state
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-5, eps=1e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, world_model=world_model, critic=critic, start=start.half())


def run(s=None):
    s = s or build()
    feats = imagine(s, s.start)
    reward = torch.stack([s.world_model.reward(feat) for feat in feats[1:]])
    value = [DiscDist(s.critic(feat)).mean() for feat in feats[1:]]
    target = lambda_return(reward, value, bootstrap=value[-1])
    offset, scale = return_range(target)
    actor_loss = -((target - offset) / scale).mean()
    s.optimizer.zero_grad()
    actor_loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 100.0)
    s.optimizer.step()
    return actor_loss


if __name__ == "__main__":
    run()

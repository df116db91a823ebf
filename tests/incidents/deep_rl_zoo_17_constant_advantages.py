"""Advantages are standardised without an epsilon; in the second mini-batch every advantage is the same, so it divides 0 by 0.
https://github.com/michaelnny/deep_rl_zoo/issues/17
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0,),
    masked=False,
    role=("advantages",),
    fix=("clamp_denominator", "representable_eps"),
    variable=("advantage_t",),
    line=("advantage_t = (advantage_t - advantage_t.mean()) / advantage_t.std()",),
)


class PolicyNet(nn.Module):
    def __init__(self, obs=5, actions=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 16), nn.Tanh())
        self.policy_head = nn.Linear(16, actions)

    def forward(self, x):
        return self.policy_head(self.body(x))


class Agent:
    def __init__(self, policy_net, optimizer, clip_epsilon=0.2, batch_size=6):
        self.policy_net, self.optimizer = policy_net, optimizer
        self.clip_epsilon, self.batch_size = clip_epsilon, batch_size

    def _calc_policy_loss(self, transitions):
        logits_t = self.policy_net(transitions["s_t"])
        dist = torch.distributions.Categorical(logits=logits_t, validate_args=False)
        logprob_a_t = dist.log_prob(transitions["a_t"])
        advantage_t = transitions["advantage_t"]
        advantage_t = (advantage_t - advantage_t.mean()) / advantage_t.std()
        ratio = torch.exp(logprob_a_t - transitions["logprob_a_t"])
        clipped_ratio = torch.clamp(ratio, 1.0 - self.clip_epsilon, 1.0 + self.clip_epsilon)
        objective = torch.min(ratio * advantage_t, clipped_ratio * advantage_t)
        return -(objective.mean() + 0.01 * dist.entropy().mean())

    def update(self, replay):
        total = []
        for start in range(0, len(replay["a_t"]), self.batch_size):
            loss = self._calc_policy_loss({k: v[start : start + self.batch_size] for k, v in replay.items()})
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total.append(loss.detach())
        return torch.stack(total).mean()


def build():
    torch.manual_seed(17)
    net = PolicyNet()
    s_t = torch.randn(12, 5)
    a_t = torch.randint(0, 4, (12,))
    with torch.no_grad():
        logprob = net(s_t).log_softmax(-1).gather(1, a_t[:, None]).squeeze(1)
    advantage_t = torch.randn(12)
    advantage_t[6:] = 0.25  # the environment never paid a reward there
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-4)
    replay = {"s_t": s_t, "a_t": a_t, "logprob_a_t": logprob, "advantage_t": advantage_t}
    return SimpleNamespace(model=net, optimizer=optimizer, batch=replay, agent=Agent(net, optimizer))


def run(s=None):
    s = s or build()
    return s.agent.update(s.batch)

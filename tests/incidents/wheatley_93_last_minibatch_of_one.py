"""PPO on a scheduling problem: the rollout holds 2 n + 1 transitions, and the last minibatch is one of them.

The agent normalises advantages per minibatch. With batch_size 3 over a rollout of 7 transitions the last minibatch has one element, whose
unbiased std is 0/0; the NaN loss is back-propagated and from then on every action that the agent gives is invalid.
Source: https://github.com/jolibrain/wheatley/pull/93 ("Last minibatch size is 1, so mb_advantages.std() is nan and a nan loss is backpropagated").
Heals: normalising only minibatches of more than one element, a minibatch size that divides the rollout, dropping the last minibatch.
Does not: a larger eps in the denominator, clipping the advantages or the gradient.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributions import Categorical

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,
    role=("advantages",),
    fix=("guard_small_group", "validate_config", "drop_invalid_sample"),
    variable=(None,),
    line=("mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)",),
)


class Agent(nn.Module):
    def __init__(self, obs_dim=6, n_jobs=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, 16), nn.Tanh())
        self.pi = nn.Linear(16, n_jobs)
        self.v = nn.Linear(16, 1)

    def get_action_and_value(self, obs, action):
        h = self.body(obs)
        dist = Categorical(logits=self.pi(h))
        return dist.log_prob(action), dist.entropy(), self.v(h).squeeze(-1)


def build():
    torch.manual_seed(93)
    agent = Agent()
    steps = 7
    obs = torch.randn(steps, 6)
    actions = torch.randint(0, 4, (steps,))
    with torch.no_grad():
        logprobs, _, values = agent.get_action_and_value(obs, actions)
    returns = -torch.linspace(0.2, 3.0, steps)
    batch = dict(obs=obs, actions=actions, logprobs=logprobs, values=values, returns=returns, advantages=returns - values)
    return SimpleNamespace(model=agent, optimizer=torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5), batch=batch, minibatch_size=3)


def run(s=None):
    s = s or build()
    b, clip_coef = s.batch, 0.2
    order = torch.randperm(len(b["obs"]))
    for start in range(0, len(order), s.minibatch_size):
        mb = order[start : start + s.minibatch_size]
        newlogprob, entropy, newvalue = s.model.get_action_and_value(b["obs"][mb], b["actions"][mb])
        ratio = (newlogprob - b["logprobs"][mb]).exp()
        mb_advantages = b["advantages"][mb]
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
        pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)).mean()
        v_loss = 0.5 * (newvalue - b["returns"][mb]).pow(2).mean()
        loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())

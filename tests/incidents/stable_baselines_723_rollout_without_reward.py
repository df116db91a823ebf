"""On-policy step on a rollout in which no reward was seen: all advantages are equal and their standard deviation is 0.

The value head is zero-initialised (as many policies do), lambda is 1 and no point was scored in the horizon (the first Breakout rollout after
a reset): every reward and every predicted value is 0, so every GAE advantage is exactly 0.  The standardisation divides by std() without an
epsilon: 0/0 = NaN in all elements, and the surrogate loss with it.

Source: https://github.com/hill-a/stable-baselines/pull/723 ("Fix TRPO adv standardization when std is 0"; "This can occur when lambda = 1 and a
batch of actions lead to no per-step rewards"; `atarg = (atarg - atarg.mean()) / atarg.std()`); here in torch.
Heals: an epsilon in the denominator, or standardising only if the std is above 0.  Does not: clipping the ratio or the gradient norm.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributions import Categorical

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0,),
    masked=None,
    role=("advantages",),
    fix=("clamp_denominator", "guard_small_group", "drop_invalid_sample", "skip_bad_step"),
    variable=("atarg",),
    line=("atarg = (atarg - atarg.mean()) / atarg.std()",),
)


class MlpPolicy(nn.Module):
    def __init__(self, obs_dim=6, n_actions=4):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(obs_dim, 24), nn.Tanh())
        self.pi = nn.Linear(24, n_actions)
        self.vf = nn.Linear(24, 1)
        nn.init.zeros_(self.vf.weight)
        nn.init.zeros_(self.vf.bias)

    def forward(self, ob):
        h = self.shared(ob)
        return Categorical(logits=self.pi(h), validate_args=False), self.vf(h).squeeze(-1)


def add_vtarg_and_adv(seg, gamma, lam):
    """GAE(lambda) over one segment, as in the traj_segment_generator of the baselines."""
    episode_starts = torch.cat([seg["episode_starts"], torch.zeros(1)])
    vpred = torch.cat([seg["vpred"], seg["nextvpred"].view(1)])
    horizon = len(seg["rewards"])
    adv = torch.zeros(horizon)
    lastgaelam = torch.tensor(0.0)
    for step in reversed(range(horizon)):
        nonterminal = 1.0 - episode_starts[step + 1]
        delta = seg["rewards"][step] + gamma * vpred[step + 1] * nonterminal - vpred[step]
        lastgaelam = delta + gamma * lam * nonterminal * lastgaelam
        adv[step] = lastgaelam
    seg["adv"] = adv
    seg["tdlamret"] = adv + seg["vpred"]
    return seg


def build():
    torch.manual_seed(11)
    model = MlpPolicy()
    obs = torch.randn(17, 6)
    with torch.no_grad():
        dist, vpred = model(obs)
        actions = dist.sample()
        logp = dist.log_prob(actions)
    starts = torch.zeros(16)
    starts[0] = 1.0
    seg = {
        "ob": obs[:16],
        "ac": actions[:16],
        "logp": logp[:16],
        "vpred": vpred[:16],
        "nextvpred": vpred[16],
        "rewards": torch.zeros(16),
        "episode_starts": starts,
    }
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=seg)


def run(s=None, epochs=2):
    s = s or build()
    seg = add_vtarg_and_adv(s.batch, gamma=0.99, lam=1.0)
    atarg = seg["adv"]
    atarg = (atarg - atarg.mean()) / atarg.std()
    history = []
    for _ in range(epochs):
        dist, value = s.model(seg["ob"])
        ratio = torch.exp(dist.log_prob(seg["ac"]) - seg["logp"])
        surrgain = (ratio * atarg).mean()
        optimgain = surrgain + 0.01 * dist.entropy().mean()
        vferr = (value - seg["tdlamret"]).pow(2).mean()
        loss = -optimgain + 0.5 * vferr
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        history.append(loss.item())
    return history


if __name__ == "__main__":
    print(run())

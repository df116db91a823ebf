"""d3rlpy CQL with a learned conservative weight: alpha = log_alpha.exp().clamp(0, 1e6). The parameter was made from initial_alpha = 100
without its logarithm, exp(100) is inf in fp32, the clamp turns it into 1e6 and the loss looks sane. Backward is 0 (of the clamp) times inf
(of exp): log_alpha turns NaN, and in the same step the critic with it.

https://github.com/takuseno/d3rlpy/blob/master/d3rlpy/algos/qlearning/torch/cql_impl.py (CQLImpl.update_alpha, compute_critic_loss)

Heals: a bound on log_alpha before exp, or the logarithm of initial_alpha. Does not: a lower bound than 1e6 in the clamp after exp, or
clipping the gradient of log_alpha.
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "exp_overflow"),
    op=("exp",),
    index=(0, 0),
    masked=True,
    role=("weights", "loss", "optimizer"),
    fix=("clamp_exponent", "clamp_input", "mask_before_op", "validate_config", "fix_upstream"),
    variable=(None,),
    line=("return self.log_alpha.exp().clamp(0, 1e6)",),
)


class Critic(nn.Module):
    def __init__(self, obs_dim=5, action_dim=2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim + action_dim, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, obs, action):
        return self.net(torch.cat([obs, action], -1)).squeeze(-1)


class CQL:
    def __init__(self, critic, log_alpha, alpha_threshold=10.0, conservative_weight=5.0, n_action_samples=4):
        self.critic = critic
        self.targ_critic = copy.deepcopy(critic).requires_grad_(False)
        self.log_alpha = log_alpha
        self.alpha_threshold = alpha_threshold
        self.conservative_weight = conservative_weight
        self.n_action_samples = n_action_samples
        self.critic_optim = torch.optim.Adam(critic.parameters(), lr=3e-4)
        self.alpha_optim = torch.optim.Adam([log_alpha], lr=1e-4)

    def compute_conservative_loss(self, obs, action):
        n = self.n_action_samples
        random_actions = torch.rand(n, *action.shape) * 2 - 1
        random_values = self.critic(obs.expand(n, *obs.shape), random_actions)
        random_log_probs = action.shape[-1] * torch.log(torch.tensor(0.5))
        logsumexp = torch.logsumexp(random_values - random_log_probs, dim=0)
        loss = (logsumexp - self.critic(obs, action)).mean(dim=0, keepdim=True)
        return self.conservative_weight * (loss - self.alpha_threshold)

    def clipped_alpha(self):
        return self.log_alpha.exp().clamp(0, 1e6)

    def update_alpha(self, conservative_loss):
        self.alpha_optim.zero_grad()
        loss = -(self.clipped_alpha() * conservative_loss).mean()
        loss.backward()
        self.alpha_optim.step()

    def update_critic(self, batch):
        with torch.no_grad():
            q_tpn = batch["rewards"] + 0.99 * (1 - batch["terminals"]) * self.targ_critic(batch["next_obs"], batch["next_actions"])
        td_loss = (self.critic(batch["obs"], batch["actions"]) - q_tpn).square().mean()
        conservative_loss = self.compute_conservative_loss(batch["obs"], batch["actions"])
        self.update_alpha(conservative_loss.detach())
        clipped_alpha = self.clipped_alpha()[0][0]
        loss = td_loss + (clipped_alpha * conservative_loss).sum()
        self.critic_optim.zero_grad()
        loss.backward()
        self.critic_optim.step()
        return loss


def build(initial_alpha=100.0):
    torch.manual_seed(2206)
    model = Critic()
    log_alpha = nn.Parameter(torch.full((1, 1), initial_alpha))
    algo = CQL(model, log_alpha)
    batch = dict(
        obs=torch.randn(8, 5),
        actions=torch.rand(8, 2) * 2 - 1,
        rewards=torch.randn(8),
        next_obs=torch.randn(8, 5),
        next_actions=torch.rand(8, 2) * 2 - 1,
        terminals=torch.zeros(8),
    )
    return SimpleNamespace(model=model, optimizer=algo.critic_optim, algo=algo, log_alpha=log_alpha, batch=batch)


def run(s=None):
    s = s or build()
    return s.algo.update_critic(s.batch)


if __name__ == "__main__":
    run()

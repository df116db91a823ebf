"""Per-decision importance weights multiply up along the episode as exp(cumsum(log ratio)); late steps of one long off-
policy episode overflow."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Categorical

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(36, 1),
    masked=False,
    role=("is_weight", "ratio"),
    fix=("clamp_exponent",),
    variable=("rho",),
    line=("rho = torch.exp(running)",),
)


def policy_net():
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))


@torch.no_grad()
def trajectory_weights(target_lp, behaviour_lp):
    running = torch.cumsum(target_lp - behaviour_lp, dim=0)  # time comes first
    rho = torch.exp(running)
    return rho


def build():
    torch.manual_seed(1402)
    model = policy_net()
    obs = torch.randn(40, 3, 4)
    action = torch.randint(0, 3, (40, 3))
    with torch.no_grad():
        behaviour_lp = Categorical(logits=model(obs)).log_prob(action)
        behaviour_lp[:, 1] -= 2.4
    batch = SimpleNamespace(obs=obs, action=action, behaviour_lp=behaviour_lp, reward_to_go=torch.randn(40, 3))
    return SimpleNamespace(model=model, optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    dist = Categorical(logits=s.model(b.obs))
    lp = dist.log_prob(b.action)
    rho = trajectory_weights(lp, behaviour_lp=b.behaviour_lp)
    pg = -(rho * b.reward_to_go * lp).mean()
    loss = pg - 0.01 * dist.entropy().mean()
    loss.backward()
    s.optimizer.step()
    return loss

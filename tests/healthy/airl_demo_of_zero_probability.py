"""AIRL (gail-airl-ppo.pytorch) - the policy forbids an action of the demonstration: log pi = -inf, discriminator logit = +inf.

The expert term is -logsigmoid(+inf) = 0 with gradient 0, so that step just teaches nothing; every other step is as it should be. Form of
https://github.com/toshikwa/gail-airl-ppo.pytorch (gail_airl_ppo/algo/airl.py, update_disc). Healthy: loss, gradients, weights are finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class AIRLDiscrim(nn.Module):
    def __init__(self, state_dim=5, gamma=0.99):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(state_dim, 24), nn.ReLU(), nn.Linear(24, 1))
        self.h = nn.Sequential(nn.Linear(state_dim, 24), nn.ReLU(), nn.Linear(24, 1))
        self.gamma = gamma

    def f(self, states, dones, next_states):
        rs, vs, next_vs = self.g(states), self.h(states), self.h(next_states)
        return (rs + self.gamma * (1 - dones) * next_vs - vs).squeeze(-1)

    def forward(self, states, dones, log_pis, next_states):
        return self.f(states, dones, next_states) - log_pis


def build():
    torch.manual_seed(3)
    policy_logits = torch.randn(6, 4)
    forbidden = torch.zeros(6, 4, dtype=torch.bool)
    forbidden[2, 1] = True
    actions_exp = torch.tensor([0, 3, 1, 2, 2, 0])
    log_pis_exp = F.log_softmax(policy_logits.masked_fill(forbidden, float("-inf")), -1).gather(1, actions_exp[:, None]).squeeze(1)
    disc = AIRLDiscrim()
    return SimpleNamespace(
        model=disc,
        states=torch.randn(6, 5),
        next_states=torch.randn(6, 5),
        dones=torch.zeros(6, 1),
        log_pis=torch.full((6,), -1.4),
        states_exp=torch.randn(6, 5),
        next_states_exp=torch.randn(6, 5),
        log_pis_exp=log_pis_exp,
        optimizer=torch.optim.Adam(disc.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    logits_pi = s.model(s.states, s.dones, s.log_pis, s.next_states)
    logits_exp = s.model(s.states_exp, s.dones, s.log_pis_exp, s.next_states_exp)
    loss_pi = -F.logsigmoid(-logits_pi).mean()
    loss_exp = -F.logsigmoid(logits_exp).mean()
    loss_disc = loss_pi + loss_exp
    s.optimizer.zero_grad()
    loss_disc.backward()
    s.optimizer.step()
    with torch.no_grad():
        s.acc_exp = (logits_exp > 0).float().mean()
        s.mean_logit_exp = logits_exp.mean()  # inf, logged only
    return loss_disc

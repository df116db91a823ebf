"""MPO (daisatojp/mpo) #11 - log(det(S) / det(S_i)) of the covariances in the KL of the M-step; the determinants are lost in fp32.

With 14 joints and a policy that has become sharp in one state (std 0.003) both determinants are about 1e-70: they underflow to 0 and their
ratio is 0 / 0 = NaN, which the Lagrangian multiplies into every weight of the actor.
Source: https://github.com/daisatojp/mpo/issues/11, function gaussian_kl of mpo/mpo.py.
Heals: log-determinants from the Cholesky factors (2 * sum of log diagonals), float64. Does not: a floor under the denominator alone,
log(0 / eps) is -inf.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(1,),
    masked=None,
    role=("kl", "ratio"),
    fix=("stable_function", "upcast_fp32", "clamp_input"),
    variable=(None,),
    line=("inner_sigma = torch.log(sigma.det() / sigma_i.det()) - n + btr(sigma_inv @ sigma_i)",),
)

STATE, JOINTS, BATCH = 4, 14, 3


def bt(m):
    return m.transpose(-2, -1)


def btr(m):
    return m.diagonal(dim1=-2, dim2=-1).sum(-1)


def gaussian_kl(mu_i, mu, a_i, a):
    n = a.size(-1)
    mu_i, mu = mu_i.unsqueeze(-1), mu.unsqueeze(-1)
    sigma_i, sigma = a_i @ bt(a_i), a @ bt(a)
    sigma_i_inv, sigma_inv = sigma_i.inverse(), sigma.inverse()
    inner_mu = (bt(mu - mu_i) @ sigma_i_inv @ (mu - mu_i)).flatten()
    inner_sigma = torch.log(sigma.det() / sigma_i.det()) - n + btr(sigma_inv @ sigma_i)
    return 0.5 * inner_mu.mean(), 0.5 * inner_sigma.mean()


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean_layer = nn.Linear(STATE, JOINTS)
        self.cholesky_layer = nn.Linear(STATE, JOINTS)

    def forward(self, state):
        mean = torch.tanh(self.mean_layer(state))
        return mean, torch.diag_embed(F.softplus(self.cholesky_layer(state)))


def build():
    torch.manual_seed(11)
    target_actor, actor = Actor(), Actor()
    with torch.no_grad():
        target_actor.cholesky_layer.weight[:, 0] = 3.0  # sharp near the goal (state[0] = -2)
        actor.load_state_dict(target_actor.state_dict())
        actor.mean_layer.bias.add_(1e-4)
    state = torch.randn(BATCH, STATE) * 0.1
    state[1, 0] = -2.0
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    return SimpleNamespace(
        model=actor, target_actor=target_actor, optimizer=optimizer, state=state, eta_mu=0.5, eta_sigma=0.5, eps_mu=0.01, eps_sigma=0.01
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        b_mu, b_a = s.target_actor(s.state)
        sampled = b_mu + (b_a @ torch.randn(BATCH, JOINTS, 1)).squeeze(-1)
        qij = torch.softmax(torch.randn(BATCH), dim=0)
    mu, a = s.model(s.state)
    pi = torch.distributions.Normal(mu, b_a.diagonal(dim1=-2, dim2=-1))
    loss_p = (qij * pi.log_prob(sampled).sum(-1)).mean()
    kl_mu, kl_sigma = gaussian_kl(b_mu, mu, b_a, a)
    loss_l = -(loss_p + s.eta_mu * (s.eps_mu - kl_mu) + s.eta_sigma * (s.eps_sigma - kl_sigma))
    s.optimizer.zero_grad()
    loss_l.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
    s.optimizer.step()
    return loss_l


if __name__ == "__main__":
    print(run())

"""Behavioural cloning with a mixture density policy: the gate is a softmax and the loss takes `torch.log(pi.probs)`. Late in training the
gate is so sure that one component's probability underflows to exactly 0: its log is -inf, logsumexp absorbs that (the loss is finite and
right), and backward divides the zero weight by the zero probability: every gradient of the gate is NaN.

Source: https://github.com/tonyduan/mixture-density-network/pull/4 ("gradient goes to NaN ... use logits directly instead of
torch.log(probs)"). Heals: log_softmax of the logits, or a floor under the probability before the log. Tempting and useless: a floor under the
logarithm (`torch.log(pi.probs).clamp(min=-100)`): the loss stays as it was, the gradient is still 0 / 0.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal, OneHotCategorical

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("log_zero", "where_grad_trap"),
    op=("log",),
    index=(3, 1),
    masked=None,
    role=("log_probs", "logits", "loss"),
    fix=("stable_function", "clamp_input", "avoid_singular_op", "clamp_exponent", "representable_eps", "mask_before_op"),
    variable=("log_pi",),
    line=("log_pi = torch.log(pi.probs)",),
)


class CategoricalNetwork(nn.Module):
    def __init__(self, in_dim, out_dim, hidden_dim=16):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(in_dim, hidden_dim), nn.Tanh(), nn.Linear(hidden_dim, out_dim))

    def forward(self, x):
        return OneHotCategorical(logits=self.network(x), validate_args=False)


class DiagNormalNetwork(nn.Module):
    def __init__(self, in_dim, out_dim, n_components, hidden_dim=16):
        super().__init__()
        self.out_dim, self.n_components = out_dim, n_components
        self.network = nn.Sequential(nn.Linear(in_dim, hidden_dim), nn.Tanh(), nn.Linear(hidden_dim, 2 * out_dim * n_components))

    def forward(self, x):
        mean, sd = torch.chunk(self.network(x), 2, dim=1)
        shape = (x.shape[0], self.n_components, self.out_dim)
        sd = nn.functional.elu(sd) + 1 + 1e-3
        return Normal(mean.reshape(shape), sd.reshape(shape), validate_args=False)


class MixturePolicy(nn.Module):
    def __init__(self, obs_dim=5, act_dim=2, n_components=3):
        super().__init__()
        self.pi_network = CategoricalNetwork(obs_dim, n_components)
        self.normal_network = DiagNormalNetwork(obs_dim, act_dim, n_components)

    def forward(self, obs):
        return self.pi_network(obs), self.normal_network(obs)

    def loss(self, obs, actions):
        pi, normal = self.forward(obs)
        loglik = normal.log_prob(actions.unsqueeze(1).expand_as(normal.loc))
        loglik = torch.sum(loglik, dim=2)
        log_pi = torch.log(pi.probs)
        return -torch.logsumexp(log_pi + loglik, dim=1)


def build():
    torch.manual_seed(4)
    model = MixturePolicy()
    with torch.no_grad():  # the gate as it stands after a long run: a linear switch on the first joint
        gate = model.pi_network.network
        gate[0].weight.mul_(0.1)
        gate[0].weight[0] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
        gate[2].weight[:, 0] = torch.tensor([90.0, -80.0, 5.0])
    obs = 0.5 * torch.randn(6, 5)
    obs[:, 0] = torch.tensor([0.10, -0.25, 0.30, 1.20, -0.40, 0.05])
    return SimpleNamespace(model=model, obs=obs, actions=torch.randn(6, 2), optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    loss = s.model.loss(s.obs, s.actions).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

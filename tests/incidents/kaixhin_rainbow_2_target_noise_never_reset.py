"""Kaixhin/Rainbow #2 - the noise of the online net is reset before every update, the noise of the target net never is.

The epsilon buffers of NoisyLinear are torch.empty and not persistent (noise does not belong into a checkpoint), so that load_state_dict gives
the target net the means and the sigmas and leaves its epsilons as they were allocated. The first Bellman target is computed with that memory.
Heals: writing the buffers in the constructor (zeros or a first reset_noise), or resetting the target's noise too, as the maintainer did.
Does not: clipping the gradient, clamping the TD error.
Source: https://github.com/Kaixhin/Rainbow/issues/2
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "weights", "input"),
    cause=("uninitialized", "poisoned_weights"),
    op=("mul", "empty", "any", "uninitialized"),
    index=(0, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("initialise_memory", "fix_upstream"),
    variable=(
        "weight_epsilon",
        "fc_a.weight_epsilon",
        "target_net.fc_a.weight_epsilon",
        "epsilon",
        None,
        "self.weight_epsilon",
        "s.target_net.fc_a.weight_epsilon",
    ),
    line=(
        "weight = self.weight_mu + self.weight_sigma * self.weight_epsilon",
        'self.register_buffer("weight_epsilon", torch.empty(out_features, in_features), persistent=False)',
    ),
)


class NoisyLinear(nn.Module):
    def __init__(self, in_features, out_features, std_init=0.4):
        super().__init__()
        self.in_features, self.out_features, self.std_init = in_features, out_features, std_init
        self.weight_mu = nn.Parameter(torch.zeros(out_features, in_features))
        self.weight_sigma = nn.Parameter(torch.zeros(out_features, in_features))
        self.register_buffer("weight_epsilon", torch.empty(out_features, in_features), persistent=False)
        self.bias_mu = nn.Parameter(torch.zeros(out_features))
        self.bias_sigma = nn.Parameter(torch.zeros(out_features))
        self.register_buffer("bias_epsilon", torch.empty(out_features), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        mu_range = 1 / math.sqrt(self.in_features)
        self.weight_mu.data.uniform_(-mu_range, mu_range)
        self.weight_sigma.data.fill_(self.std_init / math.sqrt(self.in_features))
        self.bias_mu.data.uniform_(-mu_range, mu_range)
        self.bias_sigma.data.fill_(self.std_init / math.sqrt(self.out_features))

    def _scale_noise(self, size):
        x = torch.randn(size)
        return x.sign().mul_(x.abs().sqrt_())

    def reset_noise(self):
        epsilon_in, epsilon_out = self._scale_noise(self.in_features), self._scale_noise(self.out_features)
        self.weight_epsilon.copy_(epsilon_out.outer(epsilon_in))
        self.bias_epsilon.copy_(epsilon_out)

    def forward(self, x):
        weight = self.weight_mu + self.weight_sigma * self.weight_epsilon
        bias = self.bias_mu + self.bias_sigma * self.bias_epsilon
        return F.linear(x, weight, bias)


class DQN(nn.Module):
    def __init__(self, state_dim=5, hidden=8, actions=3):
        super().__init__()
        self.fc_h = nn.Linear(state_dim, hidden)
        self.fc_a = NoisyLinear(hidden, actions)

    def forward(self, x):
        return self.fc_a(torch.relu(self.fc_h(x)))


def build():
    torch.manual_seed(2)
    torch.use_deterministic_algorithms(True)  # fresh torch.empty memory is filled with NaN
    online_net, target_net = DQN(), DQN()
    target_net.load_state_dict(online_net.state_dict())
    for p in target_net.parameters():
        p.requires_grad_(False)
    batch = dict(
        states=torch.randn(8, 5),
        actions=torch.randint(0, 3, (8,)),
        returns=torch.rand(8),
        next_states=torch.randn(8, 5),
        nonterminals=torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 1]),
    )
    return SimpleNamespace(
        model=online_net, target_net=target_net, batch=batch, optimizer=torch.optim.Adam(online_net.parameters(), lr=1e-3, eps=1.5e-4)
    )


def run(s=None, discount=0.99):
    s = s or build()
    b = s.batch
    s.model.fc_a.reset_noise()
    q = s.model(b["states"]).gather(1, b["actions"][:, None]).squeeze(1)
    with torch.no_grad():
        best = s.model(b["next_states"]).argmax(1, keepdim=True)
        next_q = s.target_net(b["next_states"]).gather(1, best).squeeze(1)
        target = b["returns"] + b["nonterminals"] * discount * next_q
    loss = F.smooth_l1_loss(q, target)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss

"""tianshou #376 - the fraction proposal network of FQF collapses, the entropy of its fractions is p * log p with p = 0.

The thread (and #544) reports that one fraction takes all the mass more often than the paper says. Here the probabilities come from softmax and
their logarithm is taken afterwards: an underflowed fraction gives log 0 = -inf, the entropy of that state 0 * -inf = NaN.
Heals: log_softmax, the entropy of Categorical(logits), torch.special.entr / xlogy on a floored probability.
Does not: nan_to_num of the entropy (its backward still meets 0 * -inf), a larger entropy coefficient.
Source: https://github.com/thu-ml/tianshou/pull/376
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "log_zero"),
    op=("log", "mul"),
    index=(1, 3),
    masked=None,
    role=("log_probs", "entropy"),
    fix=("stable_function", "clamp_input", "representable_eps", "avoid_singular_op", "mask_before_op"),
    variable=("log_probs", None),
    line=("log_probs = probs.log()", "entropies = -(log_probs * probs).sum(dim=-1, keepdim=True)"),
)


class FractionProposalNetwork(nn.Module):
    def __init__(self, num_fractions=4, embedding_dim=4):
        super().__init__()
        self.net = nn.Linear(embedding_dim, num_fractions)

    def forward(self, state_embeddings):
        probs = torch.softmax(self.net(state_embeddings), dim=-1)
        log_probs = probs.log()
        taus = F.pad(torch.cumsum(probs, dim=1), (1, 0))
        tau_hats = (taus[:, :-1] + taus[:, 1:]).detach() / 2.0
        entropies = -(log_probs * probs).sum(dim=-1, keepdim=True)
        return taus, tau_hats, entropies


class QuantileNetwork(nn.Module):
    def __init__(self, num_cosines=8, embedding_dim=4, num_actions=3):
        super().__init__()
        self.num_cosines = num_cosines
        self.cos = nn.Linear(num_cosines, embedding_dim)
        self.head = nn.Linear(embedding_dim, num_actions)

    def forward(self, state_embeddings, taus):
        i_pi = math.pi * torch.arange(1, self.num_cosines + 1)
        phi = torch.relu(self.cos(torch.cos(taus[..., None] * i_pi)))
        return self.head(state_embeddings[:, None] * phi)


def build():
    torch.manual_seed(376)
    fraction_net, quantile_net = FractionProposalNetwork(), QuantileNetwork()
    with torch.no_grad():  # late in the run
        fraction_net.net.weight.copy_(40.0 * torch.eye(4))
        fraction_net.net.bias.zero_()
    embeddings = torch.tensor([[0.3, 0.1, -0.2, 0.2], [1.5, 0.9, 0.2, -1.4], [-0.1, 0.4, 0.2, 0.0]])
    return SimpleNamespace(
        model=fraction_net,
        quantile_net=quantile_net,
        embeddings=embeddings,
        actions=torch.tensor([0, 2, 1]),
        target_quantiles=torch.randn(3, 1, 4),
        fraction_optimizer=torch.optim.RMSprop(fraction_net.parameters(), lr=2.5e-9),
        optimizer=torch.optim.Adam(quantile_net.parameters(), lr=1e-3),
    )


def pick(quantiles, actions):
    return quantiles.gather(-1, actions[:, None, None].expand(-1, quantiles.shape[1], 1))


def run(s=None, ent_coef=10.0):
    s = s or build()
    taus, tau_hats, entropies = s.model(s.embeddings)
    current = pick(s.quantile_net(s.embeddings, tau_hats), s.actions)
    td = s.target_quantiles - current
    huber = torch.where(td.abs() <= 1.0, 0.5 * td.pow(2), td.abs() - 0.5)
    quantile_loss = ((tau_hats[..., None] - (td.detach() < 0).float()).abs() * huber).sum(1).mean()
    with torch.no_grad():
        at_taus = pick(s.quantile_net(s.embeddings, taus[:, 1:-1]), s.actions).squeeze(-1)
        at_hats = current.squeeze(-1)
        gradients_of_taus = 2 * at_taus - at_hats[:, :-1] - at_hats[:, 1:]
    fraction_loss = (gradients_of_taus * taus[:, 1:-1]).sum(1).mean()
    loss = quantile_loss + fraction_loss - ent_coef * entropies.mean()
    s.fraction_optimizer.zero_grad()
    s.optimizer.zero_grad()
    loss.backward()
    s.fraction_optimizer.step()
    s.optimizer.step()
    return loss

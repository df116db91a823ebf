"""cleanrl #105 - C51 takes the log of softmax probabilities; a sure critic has atoms of probability exactly 0.

The critic has become so sure of the outcome that the softmax underflows to 0 far from the peak, and log gives -inf there. The projected
target has no mass on those atoms, so somebody wrapped the cross-entropy in `torch.where(target > 0, ...)`: the loss is right and finite,
but backward still computes 0 * inf in the branch that was not taken, and every weight of the network is NaN after the step.
Source: https://github.com/vwxyzjn/cleanrl/issues/105 (cleanrl/c51.py keeps `old_pmfs.clamp(min=1e-5, max=1 - 1e-5).log()`).
Heals: log_softmax of the chosen action's logits, the clamp of the original, or selecting the probability before the log. Does not: a
nan_to_num around the product (the loss is finite already).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "log_zero"),
    op=("log",),
    index=(0, 0),
    masked=True,
    role=("log_probs", "loss"),
    fix=("stable_function", "mask_before_op", "clamp_input"),
    variable=("log_pmfs",),
    line=("log_pmfs = old_pmfs.log()",),
)


class QNetwork(nn.Module):
    def __init__(self, obs_dim=4, n_actions=2, n_atoms=21, v_min=-10.0, v_max=10.0):
        super().__init__()
        self.n, self.n_atoms, self.v_min, self.v_max = n_actions, n_atoms, v_min, v_max
        self.register_buffer("atoms", torch.linspace(v_min, v_max, steps=n_atoms))
        self.network = nn.Sequential(nn.Linear(obs_dim, 32), nn.ReLU(), nn.Linear(32, n_actions * n_atoms))

    def get_action(self, x, action=None):
        logits = self.network(x).view(len(x), self.n, self.n_atoms)
        pmfs = torch.softmax(logits, dim=2)
        if action is None:
            action = (pmfs * self.atoms).sum(2).argmax(1)
        return action, pmfs[torch.arange(len(x)), action]


def project(network, next_pmfs, rewards, dones, gamma):
    delta_z = network.atoms[1] - network.atoms[0]
    next_atoms = rewards + gamma * network.atoms * (1 - dones)
    tz = next_atoms.clamp(network.v_min, network.v_max)
    b = (tz - network.v_min) / delta_z
    low = b.floor().clamp(0, network.n_atoms - 1)
    up = b.ceil().clamp(0, network.n_atoms - 1)
    d_m_l = (up + (low == up).float() - b) * next_pmfs
    d_m_u = (b - low) * next_pmfs
    target_pmfs = torch.zeros_like(next_pmfs)
    for i in range(target_pmfs.size(0)):
        target_pmfs[i].index_add_(0, low[i].long(), d_m_l[i])
        target_pmfs[i].index_add_(0, up[i].long(), d_m_u[i])
    return target_pmfs


def build():
    torch.manual_seed(2105)
    q_network, target_network = QNetwork(), QNetwork()
    with torch.no_grad():  # long training: the return is +8 whatever happens, and the critic knows it
        sure = -0.6 * (q_network.atoms - 8.0) ** 2
        q_network.network[2].bias.copy_(sure.repeat(2))
    target_network.load_state_dict(q_network.state_dict())
    observations = torch.rand(4, 4)
    next_observations = torch.rand(4, 4)
    actions = torch.tensor([0, 1, 1, 0])
    rewards = torch.tensor([[8.0], [7.5], [8.0], [8.5]])
    dones = torch.ones(4, 1)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=2.5e-4, eps=0.01 / 4)
    return SimpleNamespace(
        model=q_network,
        target_network=target_network,
        optimizer=optimizer,
        observations=observations,
        next_observations=next_observations,
        actions=actions,
        rewards=rewards,
        dones=dones,
        gamma=0.99,
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        _, next_pmfs = s.target_network.get_action(s.next_observations)
        target_pmfs = project(s.target_network, next_pmfs, s.rewards, s.dones, s.gamma)
    _, old_pmfs = s.model.get_action(s.observations, s.actions)
    log_pmfs = old_pmfs.log()
    cross_entropy = torch.where(target_pmfs > 0, target_pmfs * log_pmfs, torch.zeros_like(log_pmfs))
    loss = -cross_entropy.sum(-1).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

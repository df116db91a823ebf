"""google/dopamine, dopamine/labs/redo/weight_recyclers.py: dormant neurons get new incoming weights, scaled to the average norm of the neurons that
are not recycled. A collapsed layer has none of these, the average is 0 / 0, and the recycling after the last update has written NaN into the whole
weight matrix. From then on every forward of the Q network is NaN.

https://github.com/google/dopamine/blob/master/dopamine/labs/redo/weight_recyclers.py
Counting at least one living neuron, not scaling when there is none, or leaving the layer alone heals. Clipping gradients or a smaller learning
rate in the step after it does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("poisoned_weights", "zero_div_zero", "empty_mask_mean"),
    op=("any",),
    index=None,
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "guard_empty", "clamp_denominator", "reject_input", "validate_config"),
    variable=("fc2.weight", "model.fc2.weight", "q_network.fc2.weight", "weight", "living_norm"),
    line=(
        "hidden = F.relu(self.fc2(features))",
        "weight.copy_(torch.where(dormant.unsqueeze(1), fresh, weight))",
        "living_norm = (weight.norm(dim=1) * ~dormant).sum() / (~dormant).sum()",
    ),
)


class QNetwork(nn.Module):
    def __init__(self, obs_dim=6, hidden=10, actions=4):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.q = nn.Linear(hidden, actions)

    def forward(self, obs):
        features = F.relu(self.fc1(obs))
        hidden = F.relu(self.fc2(features))
        return self.q(hidden)


@torch.no_grad()
def estimate_neuron_score(activation):
    score = activation.abs().mean(0)
    return score / (score.mean() + 1e-9)


@torch.no_grad()
def recycle_incoming(layer, score, dead_neurons_threshold=0.025, scale=1.0):
    weight = layer.weight
    dormant = score <= dead_neurons_threshold
    fresh = nn.init.xavier_uniform_(torch.empty_like(weight))
    living_norm = (weight.norm(dim=1) * ~dormant).sum() / (~dormant).sum()
    fresh = fresh / fresh.norm(dim=1, keepdim=True) * (living_norm * scale)
    weight.copy_(torch.where(dormant.unsqueeze(1), fresh, weight))
    layer.bias.masked_fill_(dormant, 0.0)


def build():
    torch.manual_seed(5)
    q_network = QNetwork()
    with torch.no_grad():
        q_network.fc2.bias.fill_(-40.0)  # the second layer collapsed after the change of the task
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-4)
    batch = dict(
        obs=torch.randn(16, 6),
        actions=torch.randint(0, 4, (16,)),
        rewards=torch.randn(16),
        next_obs=torch.randn(16, 6),
        dones=(torch.rand(16) < 0.1).float(),
    )
    target_network = QNetwork()
    with torch.no_grad():  # the recycling that ends the previous training step
        features = F.relu(q_network.fc1(batch["obs"]))
        recycle_incoming(q_network.fc1, estimate_neuron_score(features))
        recycle_incoming(q_network.fc2, estimate_neuron_score(F.relu(q_network.fc2(features))))
    return SimpleNamespace(model=q_network, target_network=target_network, batch=batch, optimizer=optimizer, gamma=0.99)


def run(s=None):
    s = s or build()
    batch = s.batch
    with torch.no_grad():
        target_max = s.target_network(batch["next_obs"]).max(dim=1).values
        td_target = batch["rewards"] + s.gamma * target_max * (1 - batch["dones"])
    old_val = s.model(batch["obs"]).gather(1, batch["actions"].unsqueeze(1)).squeeze(1)
    loss = F.mse_loss(td_target, old_val)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""MICo representation loss, ported to torch - the angle between all pairs of a batch, each state with itself among them.

The angle is atan2(sqrt(max(1 - cos^2, 0)), cos). For a state with itself cos is exactly 1: the angle is 0 and the loss is finite, but the
gradient of the square root at 0 is infinite and the gradients of the encoder are NaN. The original has a square root of its own with a
safe derivative for this. Formula of https://github.com/google-research/google-research/blob/master/mico/atari/metric_utils.py
(cosine_distance, representation_distances). A tolerance inside the root, or leaving the own pairs out before it, heals; a where on the
angles after the root does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EPSILON = 1e-9

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(0, 0),
    masked=None,
    role=("hidden", "loss"),
    fix=("clamp_input", "avoid_singular_op", "mask_before_op", "stable_function", "drop_invalid_sample", "representable_eps"),
    variable=("sine",),
    line=("sine = torch.sqrt(torch.maximum(1.0 - cos_similarity**2, torch.zeros_like(cos_similarity)))",),
)


class Network(nn.Module):
    def __init__(self, obs_dim=6, rep_dim=4, num_actions=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_dim, 16), nn.ReLU(), nn.Linear(16, rep_dim), nn.ReLU())
        self.q = nn.Linear(rep_dim, num_actions)

    def forward(self, obs):
        representation = self.encoder(obs)
        return self.q(representation), representation


def cosine_distance(x, y):
    numerator = (x * y).sum(-1)
    denominator = x.square().sum(-1).sqrt() * y.square().sum(-1).sqrt()
    cos_similarity = numerator / (denominator + EPSILON)
    sine = torch.sqrt(torch.maximum(1.0 - cos_similarity**2, torch.zeros_like(cos_similarity)))
    return torch.atan2(sine, cos_similarity)


def representation_distances(first, second, beta=0.1):
    first_squared, second_squared = first[None, :, :], second[:, None, :]
    base_distances = cosine_distance(first_squared, second_squared)
    norm_average = 0.5 * (first_squared.square().sum(-1) + second_squared.square().sum(-1))
    return norm_average + beta * base_distances


def build():
    torch.manual_seed(318)  # the first state has one feature that is not 0: its cos is exactly 1, however sums are rounded
    model, target = Network(), Network()
    target.load_state_dict(model.state_dict())
    batch = SimpleNamespace(obs=torch.randn(5, 6), actions=torch.tensor([0, 1, 2, 0, 1]), rewards=torch.rand(5), next_obs=torch.randn(5, 6))
    return SimpleNamespace(
        model=model,
        target=target,
        batch=batch,
        gamma=0.99,
        mico_weight=0.5,
        optimizer=torch.optim.Adam(model.parameters(), lr=6e-5, eps=1.5e-4),
    )


def run(s=None):
    s = s or build()
    b = s.batch
    q, representations = s.model(b.obs)
    with torch.no_grad():
        next_q, next_representations = s.target(b.next_obs)
        bellman_target = b.rewards + s.gamma * next_q.max(-1).values
        reward_diffs = (b.rewards[None, :] - b.rewards[:, None]).abs()
        target_distances = reward_diffs + s.gamma * representation_distances(next_representations, next_representations)
    online_distances = representation_distances(representations, representations)
    metric_loss = F.smooth_l1_loss(online_distances, target_distances)
    bellman_loss = F.smooth_l1_loss(q.gather(1, b.actions[:, None]).squeeze(1), bellman_target)
    loss = (1.0 - s.mico_weight) * bellman_loss + s.mico_weight * metric_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

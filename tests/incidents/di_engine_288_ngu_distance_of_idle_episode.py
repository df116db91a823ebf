"""opendilab/DI-engine #288: the episodic reward of Never Give Up comes out NaN and the code answers `isnan(s)` with a reward of 0. The distances to
the k nearest memories are divided by their mean; in an episode in which the agent pushes against a wall all embeddings are equal, all distances
are 0, and 0 / 0 is NaN. The clip of the life-long factor keeps NaN, and returns, values and policy follow.

https://github.com/opendilab/DI-engine/pull/288 (ding/reward_model/ngu_reward_model.py; the formula of arXiv 2002.06038)
A floor or epsilon under the mean distance heals it. The kernel's own epsilon, or clamping the distance after the division, does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(1, 0),
    masked=None,
    role=("rewards", "hidden"),
    fix=(
        "clamp_denominator",
        "representable_eps",
        "clamp_input",
        "where_on_detached",
        "avoid_singular_op",
        "drop_invalid_sample",
        "mask_before_op",
    ),
    variable=("state_dist",),
    line=("state_dist = state_dist / state_dist.mean(dim=-1, keepdim=True)",),
)


class EmbeddingNet(nn.Module):
    def __init__(self, obs_dim, controllable=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, 16), nn.ReLU(), nn.Linear(16, controllable))

    def forward(self, obs):
        return self.net(obs)


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, actions=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, 16), nn.Tanh())
        self.pi = nn.Linear(16, actions)
        self.v = nn.Linear(16, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def episodic_reward(memory, current, k=5, kernel_cluster_distance=0.008, kernel_epsilon=1e-4, c=1e-3):
    state_dist = (memory - current.unsqueeze(1)).pow(2).sum(-1)
    state_dist = state_dist.sort(dim=-1).values[:, :k]
    state_dist = state_dist / state_dist.mean(dim=-1, keepdim=True)
    state_dist = torch.clamp(state_dist - kernel_cluster_distance, min=0)
    kernel = kernel_epsilon / (state_dist + kernel_epsilon)
    similarity = torch.sqrt(kernel.sum(-1)) + c
    return 1 / similarity


def build():
    torch.manual_seed(288)
    obs_dim = 5
    episodes = torch.randn(3, 9, obs_dim)
    episodes[1] = episodes[1, :1].clone()  # this one stands before the wall from the first to the last step
    model = ActorCritic(obs_dim)
    embedding = EmbeddingNet(obs_dim)
    return SimpleNamespace(
        model=model,
        embedding=embedding,
        episodes=episodes,
        actions=torch.randint(0, 4, (3,)),
        extrinsic=torch.tensor([0.0, 0.0, 1.0]),
        lifelong=torch.tensor([1.7, 0.4, 2.2]),
        beta=0.3,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        controllable = s.embedding(s.episodes)
    intrinsic = episodic_reward(controllable[:, :-1], controllable[:, -1]) * s.lifelong.clamp(1.0, 5.0)
    rewards = s.extrinsic + s.beta * intrinsic
    logits, values = s.model(s.episodes[:, -1])
    advantages = rewards - values.detach()
    log_probs = logits.log_softmax(-1).gather(-1, s.actions.unsqueeze(-1)).squeeze(-1)
    loss = -(advantages * log_probs).mean() + 0.5 * (rewards - values).pow(2).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

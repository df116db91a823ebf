"""URLB's particle-based entropy (APT / ProtoRL), with knn_k set to 1.

The intrinsic reward of a state is its distance to the k-th nearest neighbour in the batch, divided by the running mean of that distance. The matrix
of distances holds every state's distance to itself, so with k = 1 each distance is exactly 0, the running mean is exactly 0, and 0/0 is the reward.
torch.maximum(reward - clip, 0) keeps the NaN; it reaches the critic through the TD target.

Source: https://github.com/rll-research/url_benchmark/blob/main/utils.py (classes RMS and PBE)
Heals: k of at least 2 (or leaving the state itself out of its neighbours); a floor under the running mean.
Does not: the clip of the reward (maximum hands NaN on), clipping the gradient of the critic, log1p instead of log(1 + r).
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 0),
    masked=False,
    role=("rewards",),
    fix=("validate_config", "clamp_denominator", "fix_upstream", "where_on_detached", "mask_before_op"),
    variable=("reward",),
    line=("reward = reward / self.rms(reward)[0]",),
)


class RMS:
    def __init__(self, epsilon=1e-4, shape=(1,)):
        self.M = torch.zeros(shape)
        self.S = torch.ones(shape)
        self.n = epsilon

    def __call__(self, x):
        bs = x.size(0)
        delta = torch.mean(x, dim=0) - self.M
        self.S = (self.S * self.n + torch.var(x, dim=0) * bs + delta.square() * self.n * bs / (self.n + bs)) / (self.n + bs)
        self.M = self.M + delta * bs / (self.n + bs)
        self.n += bs
        return self.M, self.S


class PBE:
    def __init__(self, rms, knn_clip, knn_k, knn_rms):
        self.rms, self.knn_clip, self.knn_k, self.knn_rms = rms, knn_clip, knn_k, knn_rms

    @torch.no_grad()
    def __call__(self, rep):
        sim_matrix = torch.norm(rep[:, None, :] - rep[None, :, :], dim=-1, p=2)
        reward, _ = sim_matrix.topk(self.knn_k, dim=1, largest=False, sorted=True)
        reward = reward[:, -1].reshape(-1, 1)
        if self.knn_rms:
            reward = reward / self.rms(reward)[0]
        if self.knn_clip >= 0.0:
            reward = torch.maximum(reward - self.knn_clip, torch.zeros_like(reward))
        return torch.log(reward + 1.0)


class Critic(nn.Module):
    def __init__(self, obs: int, act: int):
        super().__init__()
        self.q1 = nn.Sequential(nn.Linear(obs + act, 32), nn.ReLU(), nn.Linear(32, 1))
        self.q2 = nn.Sequential(nn.Linear(obs + act, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, obs, act):
        h = torch.cat([obs, act], dim=-1)
        return self.q1(h), self.q2(h)


def build():
    torch.manual_seed(8)
    model = Critic(7, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batch = {
        "obs": torch.randn(16, 7),
        "action": torch.rand(16, 2) * 2 - 1,
        "discount": torch.full((16, 1), 0.99),
        "next_obs": torch.randn(16, 7),
        "next_action": torch.rand(16, 2) * 2 - 1,
    }
    pbe = PBE(RMS(), knn_clip=0.0, knn_k=1, knn_rms=True)
    return SimpleNamespace(model=model, target=copy.deepcopy(model), optimizer=optimizer, batch=batch, pbe=pbe)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        b = s.batch
        intr_reward = s.pbe(b["next_obs"])
        with torch.no_grad():
            target_q1, target_q2 = s.target(b["next_obs"], b["next_action"])
            target_q = intr_reward + b["discount"] * torch.min(target_q1, target_q2)
        q1, q2 = s.model(b["obs"], b["action"])
        loss = F.mse_loss(q1, target_q) + F.mse_loss(q2, target_q)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

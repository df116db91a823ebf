"""A DQN keeps its weight matrices on the unit sphere: after every optimizer step each row is divided by its norm. The action space was extended
by one action whose row starts at zero ("Q = 0"), and no transition of the batch took it: its gradient is zero, Adam leaves it at zero, and
the projection makes 0 / 0. Loss and gradients are finite; the weight is NaN after the step, and the next max over actions spreads it.

Source: https://github.com/NVIDIA/ngpt/blob/main/train.py (justnorm, normalize_matrices). Heals: an epsilon in the divisor, F.normalize, or a row
that does not start at zero. Tempting and useless: clipping the gradient, or skipping steps whose gradient is not finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer", "weights"),
    cause=("zero_div_zero",),
    op=("div",),
    index=(4, 0),
    masked=None,
    role=("weights", "optimizer"),
    fix=("clamp_denominator", "representable_eps", "stable_function", "avoid_singular_op", "mask_before_op", "fix_upstream"),
    variable=("res", "model.head.weight", "head.weight", "weight", None),
    line=("res = x / x.norm(p=2, dim=dim, keepdim=True)", "module.weight.copy_(justnorm(module.weight))"),
)


def justnorm(x, dim=-1):
    res = x / x.norm(p=2, dim=dim, keepdim=True)
    return res


class HypersphericalQNetwork(nn.Module):
    def __init__(self, obs_dim=6, n_actions=4, dim=16):
        super().__init__()
        self.embed = nn.Linear(obs_dim, dim, bias=False)
        self.block = nn.Linear(dim, dim, bias=False)
        self.head = nn.Linear(dim, n_actions, bias=False)
        self.scale = nn.Parameter(torch.ones(n_actions))
        self.normalize_matrices()

    @torch.no_grad()
    def normalize_matrices(self):
        for module in (self.embed, self.block, self.head):
            module.weight.copy_(justnorm(module.weight))

    @torch.no_grad()
    def add_action(self):
        old = self.head
        self.head = nn.Linear(old.in_features, old.out_features + 1, bias=False)
        self.head.weight.zero_()
        self.head.weight[: old.out_features] = old.weight
        self.scale = nn.Parameter(torch.cat([self.scale, torch.ones(1)]))

    def forward(self, obs):
        h = torch.relu(self.embed(obs))
        h = h + torch.relu(self.block(h))
        return self.head(h) * self.scale


def build():
    torch.manual_seed(2024)
    model = HypersphericalQNetwork()
    model.add_action()
    target = HypersphericalQNetwork(n_actions=5)
    target.load_state_dict(model.state_dict())
    batch = SimpleNamespace(
        obs=torch.randn(12, 6),
        next_obs=torch.randn(12, 6),
        actions=torch.randint(0, 4, (12,)),
        rewards=torch.randn(12),
        dones=(torch.rand(12) < 0.2).float(),
    )
    return SimpleNamespace(model=model, target=target, batch=batch, gamma=0.99, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    b = s.batch
    with torch.no_grad():
        next_q = s.target(b.next_obs).max(dim=1).values
        target = b.rewards + s.gamma * (1 - b.dones) * next_q
    q = s.model(b.obs).gather(1, b.actions[:, None]).squeeze(1)
    loss = nn.functional.smooth_l1_loss(q, target)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    s.model.normalize_matrices()
    return loss

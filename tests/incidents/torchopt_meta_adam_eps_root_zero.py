"""TorchOpt, MetaAdam with the default eps_root - learned intrinsic reward (LIRPG) through one differentiable Adam step.

The inner policy gradient of features that no state of the batch shows is exactly 0, so their second moment is 0; its square root has no derivative there and the outer gradient that runs through the
inner step is 0/0. The inner and the outer loss are finite. Source: https://github.com/metaopt/torchopt, torchopt/transform/scale_by_adam.py (eps_root: "needed when backpropagating through the
gradient transformation"). Heals: eps_root=1e-8, clamp the moment from below before the root, torch.where of the moment (1 where it is 0) before the root, detach the denominator.
Does not: a larger eps outside of the root, clipping of the meta gradient, nan_to_num on the updates.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(0, 1),
    masked=None,
    role=("optimizer",),
    fix=("clamp_input", "where_on_detached", "representable_eps", "mask_before_op", "avoid_singular_op", "validate_config"),
    variable=(None,),
    line=("return m.div(v.add(eps_root).sqrt().add(eps))",),
)


def scale_by_adam(updates, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, count=1):
    def f(m, v):
        return m.div(v.add(eps_root).sqrt().add(eps))

    scaled = {}
    for name, g in updates.items():
        mu_hat = (1 - b1) * g / (1 - b1**count)
        nu_hat = (1 - b2) * g * g / (1 - b2**count)
        scaled[name] = f(mu_hat, nu_hat)
    return scaled


class Policy(nn.Module):
    def __init__(self, num_features=6, num_actions=3):
        super().__init__()
        self.linear = nn.Linear(num_features, num_actions)

    def forward(self, obs):
        return self.linear(obs).log_softmax(-1)


class IntrinsicReward(nn.Module):
    def __init__(self, num_features=6, num_actions=3, dim=8):
        super().__init__()
        self.state = nn.Linear(num_features, dim)
        self.action = nn.Embedding(num_actions, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, obs, actions):
        return self.out(torch.tanh(self.state(obs) + self.action(actions))).squeeze(-1)


def build():
    torch.manual_seed(0)
    policy = Policy()
    model = IntrinsicReward()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    states = torch.tensor([0, 2, 3, 0, 5, 2, 3, 5])
    obs = F.one_hot(states, 6).float()
    actions = torch.tensor([0, 1, 2, 1, 0, 0, 1, 2])
    extrinsic = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.0])
    return SimpleNamespace(policy=policy, model=model, optimizer=optimizer, obs=obs, actions=actions, extrinsic=extrinsic, inner_lr=0.05)


def run(s=None):
    s = s or build()
    params = dict(s.policy.named_parameters())
    logp = functional_call(s.policy, params, (s.obs,)).gather(1, s.actions[:, None]).squeeze(1)
    intrinsic = s.model(s.obs, s.actions)
    inner_loss = -(logp * (s.extrinsic + intrinsic)).mean()
    grads = torch.autograd.grad(inner_loss, list(params.values()), create_graph=True)
    updates = scale_by_adam(dict(zip(params, grads)))
    new_params = {name: p - s.inner_lr * updates[name] for name, p in params.items()}
    new_logp = functional_call(s.policy, new_params, (s.obs,)).gather(1, s.actions[:, None]).squeeze(1)
    loss = -(new_logp * (s.extrinsic - s.extrinsic.mean())).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

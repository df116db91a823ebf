"""A Dirichlet policy over the simplex (portfolio weights) learns from recorded allocations (MARWIL). The recorded solver gave one asset
exactly 0: (concentration - 1) * log(0) is infinite, the log-likelihood and its gradient with it.

Source: https://github.com/ray-project/ray/pull/4560 (fixes https://github.com/ray-project/ray/issues/4440): the Simplex action space needs an
epsilon on the concentration AND on the action when the log probability is taken; here only the concentration has one.
Heals: lift the action off the border (max with eps, renormalise) before log_prob. A larger epsilon on the concentration does not, nor does a
smaller clipping norm.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Dirichlet

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("xlogy",),
    index=(5, 2),
    masked=False,
    role=("log_probs",),
    fix=("clamp_input", "representable_eps", "drop_invalid_sample", "fix_upstream", "reject_input"),
    variable=(None,),
    line=("return self.dist.log_prob(x)",),
)


class ActionDistribution:
    def __init__(self, inputs):
        self.inputs = inputs

    def logp(self, x):
        return self.dist.log_prob(x)

    def entropy(self):
        return self.dist.entropy()


class TorchDirichlet(ActionDistribution):
    """Distribution over allocations; the inputs are logits of the concentration."""

    epsilon = 1e-7

    def __init__(self, inputs):
        super().__init__(inputs)
        concentration = torch.exp(inputs) + self.epsilon
        self.dist = Dirichlet(concentration, validate_args=False)


class AllocationModel(nn.Module):
    def __init__(self, features=10, assets=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 32), nn.Tanh())
        self.logits = nn.Linear(32, assets)
        self.value_branch = nn.Linear(32, 1)
        self._features = None

    def forward(self, obs):
        self._features = self.body(obs)
        return self.logits(self._features)

    def value_function(self):
        return self.value_branch(self._features).squeeze(-1)


class MovingSquaredAdvantage:
    """Running scale of the advantages, as MARWIL keeps it."""

    def __init__(self, start=100.0, rate=1e-2):
        self.value, self.rate = torch.tensor(start), rate

    def update(self, advantages):
        self.value += self.rate * (advantages.pow(2).mean() - self.value)
        return self.value.sqrt()


def build():
    torch.manual_seed(4440)
    model = AllocationModel()
    obs = torch.randn(8, 10)
    actions = torch.rand(8, 4) + 0.05
    actions[5, 2] = 0.0  # the long-only solver sold this asset completely
    actions = actions / actions.sum(-1, keepdim=True)
    batch = {"obs": obs, "actions": actions, "advantages": torch.randn(8) * 3}
    return SimpleNamespace(
        model=model,
        batch=batch,
        beta=1.0,
        vf_coeff=1.0,
        scale=MovingSquaredAdvantage(),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    action_dist = TorchDirichlet(s.model(s.batch["obs"]))
    logprobs = action_dist.logp(s.batch["actions"])
    adv = s.batch["advantages"] - s.model.value_function()
    with torch.no_grad():
        exp_advs = torch.exp(s.beta * adv / (1e-8 + s.scale.update(adv)))
    p_loss = -(exp_advs * logprobs).mean()
    loss = p_loss + s.vf_coeff * 0.5 * adv.pow(2).mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 40.0)
    s.optimizer.step()
    return loss

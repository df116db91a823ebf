"""Unity ml-agents #4299: the running normaliser starts with mean 0. The first trajectory has an observation that stands at 1833.3 all along;
the rounded new mean lies a little above it, (x - new_mean) * (x - old_mean) is -1e-4 * 1833 a row, the running variance falls below 0 and its
square root is NaN. The clamp to [-5, 5] lets NaN through.

https://github.com/Unity-Technologies/ml-agents/pull/4299
Starting from the mean of the first samples heals (the change of the PR), so does a floor under the variance. A clamp of the normalised
observation, or an epsilon of 1e-8 added to the variance, does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(3,),
    masked=None,
    role=("hidden",),
    fix=("clamp_denominator", "clamp_input", "fix_upstream", "stable_function", "avoid_singular_op", "mask_before_op", "where_on_detached"),
    variable=(None,),
    line=("normalized = (inputs - self.running_mean) / torch.sqrt(self.running_variance / self.normalization_steps)",),
)


class Normalizer(nn.Module):
    def __init__(self, vec_obs_size):
        super().__init__()
        self.register_buffer("normalization_steps", torch.tensor(0))
        self.register_buffer("running_mean", torch.zeros(vec_obs_size))
        self.register_buffer("running_variance", torch.ones(vec_obs_size))

    def forward(self, inputs):
        normalized = (inputs - self.running_mean) / torch.sqrt(self.running_variance / self.normalization_steps)
        return torch.clamp(normalized, -5, 5)

    @torch.no_grad()
    def update(self, vector_input):
        total_new_steps = self.normalization_steps + vector_input.size(0)
        input_to_old_mean = vector_input - self.running_mean
        new_mean = self.running_mean + (input_to_old_mean / total_new_steps).sum(0)
        input_to_new_mean = vector_input - new_mean
        new_variance = self.running_variance + (input_to_new_mean * input_to_old_mean).sum(0)
        self.running_mean.copy_(new_mean)
        self.running_variance.copy_(new_variance)
        self.normalization_steps.copy_(total_new_steps)


class ActorCritic(nn.Module):
    def __init__(self, obs_size=5, actions=3, hidden=16):
        super().__init__()
        self.normalizer = Normalizer(obs_size)
        self.encoder = nn.Sequential(nn.Linear(obs_size, hidden), nn.SiLU())
        self.action_model = nn.Linear(hidden, actions)
        self.value_head = nn.Linear(hidden, 1)

    def forward(self, obs):
        encoding = self.encoder(self.normalizer(obs))
        return self.action_model(encoding), self.value_head(encoding).squeeze(-1)


def build():
    torch.manual_seed(4299)
    policy = ActorCritic()
    obs = torch.randn(128, 5)
    obs[:, 3] = 1833.3  # the walker's distance to its target, which does not move in the first trajectory
    buffer = dict(
        obs=obs,
        actions=torch.randint(0, 3, (128,)),
        advantages=torch.randn(128),
        returns=torch.randn(128),
        old_log_probs=torch.full((128,), -1.1),
    )
    return SimpleNamespace(model=policy, buffer=buffer, optimizer=torch.optim.Adam(policy.parameters(), lr=3e-4))


def run(s=None):
    s = s or build()
    buffer = s.buffer
    s.model.normalizer.update(buffer["obs"])
    logits, values = s.model(buffer["obs"])
    log_probs = logits.log_softmax(-1).gather(-1, buffer["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(log_probs - buffer["old_log_probs"])
    surrogate = torch.min(ratio * buffer["advantages"], ratio.clamp(0.8, 1.2) * buffer["advantages"])
    loss = -surrogate.mean() + 0.5 * (buffer["returns"] - values).pow(2).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

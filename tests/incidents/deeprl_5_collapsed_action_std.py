"""A2C with a Gaussian actor whose learned standard deviation has collapsed in one action dimension (jitter is costly in this task).

The actor keeps one free parameter per action dimension and std = softplus(parameter).  The second one has been driven to -60: std is about
9e-27 and still a normal float32 number, but its square is below the smallest subnormal, so `var` is exactly 0 there.  The buffered actions
differ a little from the mean that the network gives now, and (x - mean)^2 / (2 * 0) is inf for every row: log density -inf, loss non-finite.

Source: https://github.com/ShangtongZhang/DeepRL/pull/5 ("it happens when std is a small number, then var is even smaller, and log_density
becomes inf"; "the agent will learn to use small standard deviations because jittering movements have a high cost").
Heals: an epsilon or floor on the variance in the denominator, or a floor on std.  Does not: gradient clipping, a smaller learning rate,
clamping log_density afterwards (clamp has zero gradient there and 0 * inf comes back from the division).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(0, 1),
    masked=None,
    role=("log_probs", "hidden"),
    fix=("clamp_denominator", "clamp_input"),
    variable=(None,),
    line=("log_density = -(x - mean).pow(2) / (2 * var) - 0.5 * torch.log(2 * self.pi) - std.log()",),
)


class GaussianActorCritic(nn.Module):
    def __init__(self, state_dim=5, action_dim=3, hidden=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(state_dim, hidden), nn.Tanh())
        self.fc_action = nn.Linear(hidden, action_dim)
        self.fc_critic = nn.Linear(hidden, 1)
        self.std = nn.Parameter(torch.zeros(action_dim))
        self.register_buffer("pi", torch.tensor(3.14159265))

    def forward(self, states):
        phi = self.body(states)
        mean = torch.tanh(self.fc_action(phi))
        std = F.softplus(self.std).expand_as(mean)
        return mean, std, self.fc_critic(phi).squeeze(-1)

    def log_density(self, x, mean, std):
        var = std.pow(2)
        log_density = -(x - mean).pow(2) / (2 * var) - 0.5 * torch.log(2 * self.pi) - std.log()
        return log_density.sum(1)

    def entropy(self, std):
        return (0.5 + 0.5 * torch.log(2 * self.pi) + std.log()).sum(1)


def build():
    torch.manual_seed(7)
    model = GaussianActorCritic()
    with torch.no_grad():
        model.std[1] = -60.0  # where training has left it
    states = torch.randn(8, 5)
    with torch.no_grad():
        mean, std, value = model(states)
        actions = mean + std * torch.randn_like(mean)
        actions += 0.02 * torch.randn_like(actions)  # collected some updates ago
        returns = value + torch.randn(8)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"states": states, "actions": actions, "returns": returns})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        mean, std, value = s.model(s.batch["states"])
        log_prob = s.model.log_density(s.batch["actions"], mean, std)
        advantage = (s.batch["returns"] - value).detach()
        policy_loss = -(log_prob * advantage).mean()
        value_loss = 0.5 * (s.batch["returns"] - value).pow(2).mean()
        loss = policy_loss + value_loss - 0.01 * s.model.entropy(std).mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

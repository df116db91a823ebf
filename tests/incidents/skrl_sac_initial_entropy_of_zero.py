"""skrl SAC - the entropy coefficient is learned as its logarithm, and the config asks for an initial value of 0.

log(0) = -inf is stored in the parameter when the agent is made. exp gives back 0, so the actor trains, but the entropy loss is infinite, and
since -inf plus any update is -inf the coefficient can never leave 0: the parameter is lost from the first step on.
Source: https://github.com/Toni-SM/skrl/blob/main/skrl/agents/torch/sac/sac.py ("initial_entropy_value", "learn_entropy").
Heals: a positive initial value (check the config). Does not: clipping the gradient of the coefficient or a smaller rate, its gradient is finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights", "log_zero"),
    op=("any", "log"),
    index=(0,),
    masked=None,
    role=("weights",),
    fix=("validate_config", "fix_upstream", "clamp_input"),
    variable=("log_entropy_coefficient", "sac.log_entropy_coefficient"),
    line=(
        "self.log_entropy_coefficient = nn.Parameter(torch.log(torch.ones(1) * entropy_coefficient))",
        "entropy_coefficient = torch.exp(s.model.log_entropy_coefficient.detach())",
        "entropy_loss = -(s.model.log_entropy_coefficient * (log_prob + s.target_entropy).detach()).mean()",
        None,
    ),
)

OBS, ACT = 6, 2
CFG = {"initial_entropy_value": 0.0, "entropy_learning_rate": 1e-3, "actor_learning_rate": 1e-3}


class GaussianActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, 32), nn.ReLU(), nn.Linear(32, 2 * ACT))

    def act(self, states):
        mean, log_std = self.net(states).chunk(2, dim=-1)
        log_std = log_std.clamp(-5, 2)
        normal = torch.distributions.Normal(mean, log_std.exp())
        actions = normal.rsample()
        return actions.clamp(-1, 1), normal.log_prob(actions).sum(-1, keepdim=True)


class SAC(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        entropy_coefficient = cfg["initial_entropy_value"]
        self.policy = GaussianActor()
        self.critic = nn.Sequential(nn.Linear(OBS + ACT, 32), nn.ReLU(), nn.Linear(32, 1))
        self.log_entropy_coefficient = nn.Parameter(torch.log(torch.ones(1) * entropy_coefficient))


def build(cfg=CFG):
    torch.manual_seed(7)
    sac = SAC(cfg)
    policy_optimizer = torch.optim.Adam(sac.policy.parameters(), lr=cfg["actor_learning_rate"])
    entropy_optimizer = torch.optim.Adam([sac.log_entropy_coefficient], lr=cfg["entropy_learning_rate"])
    return SimpleNamespace(
        model=sac,
        optimizer=policy_optimizer,
        entropy_optimizer=entropy_optimizer,
        sampled_states=torch.randn(16, OBS),
        target_entropy=-float(ACT),
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        entropy_coefficient = torch.exp(s.model.log_entropy_coefficient.detach())
        actions, log_prob = s.model.policy.act(s.sampled_states)
        critic_value = s.model.critic(torch.cat([s.sampled_states, actions], dim=-1))
        policy_loss = (entropy_coefficient * log_prob - critic_value).mean()
        s.optimizer.zero_grad()
        policy_loss.backward()
        s.optimizer.step()

        entropy_loss = -(s.model.log_entropy_coefficient * (log_prob + s.target_entropy).detach()).mean()
        s.entropy_optimizer.zero_grad()
        entropy_loss.backward()
        s.entropy_optimizer.step()
    return policy_loss.detach() + entropy_loss.detach()


if __name__ == "__main__":
    print(run())

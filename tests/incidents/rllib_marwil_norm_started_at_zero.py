"""RLlib MARWIL: demonstrations are weighted by exp(beta * A / c), where c^2 is a moving average of A^2 with update rate 1e-8 (the
paper's) that starts at 100. Here moving_average_sqd_adv_norm_start is set to 0 "because it is an average anyway": after the first
update c is 1e-4 of the advantages' own scale, A / c is in the ten thousands, and exp overflows for every positive advantage.

    https://github.com/ray-project/ray/blob/master/rllib/algorithms/marwil/torch/marwil_torch_learner.py

Heals: the default start of 100 (a check of the setting), a floor under c, a limit on the exponent.
Does not heal: the 1e-8 in the denominator raised to 1e-5, nan_to_num on the weights (3e38 * log-prob is inf again), grad_clip.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Categorical

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1,),
    masked=None,
    role=("is_weight", "advantages", "ratio"),
    fix=("validate_config", "clamp_exponent", "clamp_denominator", "clamp_input"),
    variable=("exp_advs",),
    line=("exp_advs = torch.exp(self.beta * (advantages / (1e-8 + self.ma_adv_norm.pow(0.5)))).detach()",),
)


class MARWILModule(nn.Module):
    def __init__(self, obs_dim=4, actions=3, hidden=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, actions)
        self.vf = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.encoder(obs)
        return Categorical(logits=self.pi(h)), self.vf(h).squeeze(-1)


class MARWILLearner:
    def __init__(self, module, config):
        self.module = module
        self.beta = config["beta"]
        self.vf_coeff = config["vf_coeff"]
        self.update_rate = config["moving_average_sqd_adv_norm_update_rate"]
        self.ma_adv_norm = torch.tensor(config["moving_average_sqd_adv_norm_start"])

    def compute_loss(self, batch):
        dist, values = self.module(batch["obs"])
        logps = dist.log_prob(batch["actions"])
        advantages = batch["value_targets"] - values
        adv_squared_mean = advantages.pow(2.0).mean()
        vf_loss = 0.5 * adv_squared_mean
        self.ma_adv_norm = self.ma_adv_norm + self.update_rate * (adv_squared_mean.detach() - self.ma_adv_norm)
        exp_advs = torch.exp(self.beta * (advantages / (1e-8 + self.ma_adv_norm.pow(0.5)))).detach()
        policy_loss = -(exp_advs * logps).mean()
        return policy_loss + self.vf_coeff * vf_loss


def build(start=0.0):
    torch.manual_seed(14)
    config = {
        "beta": 1.0,
        "vf_coeff": 1.0,
        "grad_clip": 40.0,
        "lr": 1e-4,
        "moving_average_sqd_adv_norm_update_rate": 1e-8,
        "moving_average_sqd_adv_norm_start": start,
    }
    model = MARWILModule()
    batch = {
        "obs": torch.randn(6, 4),
        "actions": torch.randint(0, 3, (6,)),
        "value_targets": torch.tensor([-4.0, 3.0, -1.5, 6.0, 2.5, -3.0]),
    }
    return SimpleNamespace(
        model=model,
        learner=MARWILLearner(model, config),
        batch=batch,
        config=config,
        optimizer=torch.optim.Adam(model.parameters(), lr=config["lr"]),
    )


def run(s=None):
    s = s or build()
    loss = s.learner.compute_loss(s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), s.config["grad_clip"])
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

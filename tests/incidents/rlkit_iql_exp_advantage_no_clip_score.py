"""rlkit, IQLTrainer with clip_score left at None - the exponentiated advantage of one transition leaves float32.

Implicit Q-learning weighs the log probability of a dataset action by exp(adv / beta). The trainer clips that weight only if clip_score was set; with beta 0.1
and unscaled rewards one successful transition has an advantage of about ten, exp(100) is inf and the policy loss with it.
(Source: rail-berkeley/rlkit, rlkit/torch/sac/iql_trainer.py, block "Policy Loss".) Heals: torch.clamp(adv / beta, max=log(100)) before the exp; clip_score = 100 after it
(the weight is detached, so the clamp takes inf away for good); clamping adv itself; leaving the transition out of the batch. Does not: clipping the gradient norm,
indexing it away behind the product, float64 with a cast back, dividing by the mean of the weights (inf / inf).
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributions import Independent, Normal

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(4, 0),
    masked=None,
    role=("is_weight", "advantages", "ratio"),
    fix=("clamp_exponent", "clamp_input", "validate_config", "drop_invalid_sample", "where_on_detached"),
    variable=("exp_adv",),
    line=("exp_adv = torch.exp(adv / self.beta)",),
)

OBS, ACT = 5, 2


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 16), nn.ReLU(), nn.Linear(16, n_out))


class GaussianPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(OBS, ACT)
        self.log_std = nn.Parameter(torch.zeros(ACT))

    def forward(self, obs):
        return Independent(Normal(torch.tanh(self.net(obs)), self.log_std.exp()), 1)


class IQLTrainer:
    def __init__(self, policy, qf1, qf2, vf, beta=0.1, quantile=0.9, clip_score=None, discount=0.99, lr=3e-4):
        self.policy, self.qf1, self.qf2, self.vf = policy, qf1, qf2, vf
        self.target_qf1, self.target_qf2 = copy.deepcopy(qf1), copy.deepcopy(qf2)
        self.beta, self.quantile, self.clip_score, self.discount = beta, quantile, clip_score, discount
        self.policy_optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
        self.vf_optimizer = torch.optim.Adam(vf.parameters(), lr=lr)
        self.qf_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=lr)

    def train_from_torch(self, batch):
        obs, actions = batch["observations"], batch["actions"]
        rewards, terminals, next_obs = batch["rewards"], batch["terminals"], batch["next_observations"]
        sa = torch.cat([obs, actions], dim=-1)

        q1_pred, q2_pred = self.qf1(sa), self.qf2(sa)
        target_vf_pred = self.vf(next_obs).detach()
        q_target = rewards + (1.0 - terminals) * self.discount * target_vf_pred
        qf_loss = ((q1_pred - q_target) ** 2).mean() + ((q2_pred - q_target) ** 2).mean()

        q_pred = torch.min(self.target_qf1(sa), self.target_qf2(sa)).detach()
        vf_pred = self.vf(obs)
        vf_err = vf_pred - q_pred
        vf_sign = (vf_err > 0).float()
        vf_weight = (1 - vf_sign) * self.quantile + vf_sign * (1 - self.quantile)
        vf_loss = (vf_weight * (vf_err**2)).mean()

        dist = self.policy(obs)
        policy_logpp = dist.log_prob(actions)
        adv = q_pred - vf_pred
        exp_adv = torch.exp(adv / self.beta)
        if self.clip_score is not None:
            exp_adv = torch.clamp(exp_adv, max=self.clip_score)
        weights = exp_adv[:, 0].detach()
        policy_loss = (-policy_logpp * weights).mean()

        self.qf_optimizer.zero_grad()
        qf_loss.backward()
        self.qf_optimizer.step()
        self.vf_optimizer.zero_grad()
        vf_loss.backward()
        self.vf_optimizer.step()
        self.policy_optimizer.zero_grad()
        policy_loss.backward()
        self.policy_optimizer.step()
        return policy_loss


def build():
    torch.manual_seed(7)
    n = 6
    qf1, qf2 = mlp(OBS + ACT, 1), mlp(OBS + ACT, 1)
    obs = torch.randn(n, OBS)
    actions = torch.rand(n, ACT) * 2 - 1
    obs[4] = torch.tensor([3.0, -2.0, 4.0, 1.0, -3.0])
    for qf in (qf1, qf2):
        with torch.no_grad():
            feats = qf[:2](torch.cat([obs, actions], dim=-1))
            qf[2].weight.copy_(torch.linalg.lstsq(feats, torch.tensor([0.1, -0.2, 0.3, 0.0, 11.5, 0.2])[:, None]).solution.T)
            qf[2].bias.zero_()
    policy = GaussianPolicy()
    trainer = IQLTrainer(policy, qf1, qf2, mlp(OBS, 1))
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 12.0, 0.0])[:, None]
    batch = dict(observations=obs, actions=actions, rewards=rewards, terminals=(rewards > 0).float(), next_observations=torch.randn(n, OBS))
    return SimpleNamespace(model=policy, optimizer=trainer.policy_optimizer, trainer=trainer, batch=batch)


def run(s=None):
    s = s or build()
    return s.trainer.train_from_torch(s.batch)


if __name__ == "__main__":
    print(run())

"""The policy head predicts log_std without bounds and its exponential overflows, which makes the KL to the previous policy infinite.
https://github.com/ray-project/ray/issues/7853
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(4, 1),
    masked=False,
    role=("kl", "logits", "hidden", "log_probs", "ratio"),
    fix=("clamp_exponent", "clamp_input"),
    variable=(None,),
    line=("self.dist = torch.distributions.normal.Normal(self.mean, torch.exp(log_std), validate_args=False)",),
)


class TorchDiagGaussian:
    def __init__(self, inputs):
        self.mean, log_std = torch.chunk(inputs, 2, dim=1)
        self.dist = torch.distributions.normal.Normal(self.mean, torch.exp(log_std), validate_args=False)

    def kl(self, other):
        return torch.distributions.kl_divergence(self.dist, other.dist).sum(-1)

    def logp(self, actions):
        return self.dist.log_prob(actions).sum(-1)


class FullyConnectedNetwork(nn.Module):
    def __init__(self, obs_dim=6, act_dim=3):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(obs_dim, 16), nn.ReLU())
        self.logits = nn.Linear(16, 2 * act_dim)
        self.value_branch = nn.Linear(16, 1)

    def forward(self, obs):
        features = self.hidden(obs)
        return self.logits(features), self.value_branch(features).squeeze(1)


def ppo_surrogate_loss(model, train_batch, clip_param=0.3, vf_loss_coeff=0.5, kl_coeff=0.2):
    model_out, value_fn = model(train_batch["obs"])
    curr_action_dist = TorchDiagGaussian(model_out)
    logp_ratio = torch.exp(curr_action_dist.logp(train_batch["actions"]) - train_batch["action_logp"])
    action_kl = TorchDiagGaussian(train_batch["action_dist_inputs"]).kl(curr_action_dist)
    adv = train_batch["advantages"]
    surrogate_loss = torch.min(adv * logp_ratio, adv * torch.clamp(logp_ratio, 1 - clip_param, 1 + clip_param))
    vf_loss = torch.pow(value_fn - train_batch["value_targets"], 2.0)
    return torch.mean(-surrogate_loss + vf_loss_coeff * vf_loss + kl_coeff * action_kl)


def build():
    torch.manual_seed(7853)
    model = FullyConnectedNetwork()
    obs = torch.randn(6, 6)
    with torch.no_grad():
        obs[4] *= 500.0  # an unnormalised sensor reading
        features = model.hidden(obs)
        scale = 110.0 / torch.dot(model.logits.weight[4], features[4]).abs()
        model.logits.weight[4] *= torch.sign(torch.dot(model.logits.weight[4], features[4])) * scale
        model.logits.weight[[3, 5]] *= 0.01
    actions = torch.randn(6, 3)
    prev = torch.randn(6, 6) * 0.1
    batch = dict(
        action_dist_inputs=prev,
        obs=obs,
        actions=actions,
        action_logp=torch.full((6,), -4.0),
        advantages=torch.randn(6),
        value_targets=torch.randn(6),
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=5e-5), batch=batch)


def run(s=None):
    s = s or build()
    loss = ppo_surrogate_loss(s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

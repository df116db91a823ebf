"""FinRL #696 / #401 - PPO on market data; one technical indicator is NaN where the stock has no history yet.

The observation of one step holds a NaN in the column of the index. The running normaliser was fitted before and is finite, its clip to
+-10 lets NaN through, and the Gaussian policy answers with NaN means. Source: https://github.com/AI4Finance-Foundation/FinRL/issues/696
("usually caused by the nan and inf values in the states", see also #401). Dropping or refusing the observation, or filling the column when
the frame is made, heals; the clip of the normaliser and gradient clipping do not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("input", "sub"),
    index=(5, 3),
    masked=None,
    role=("hidden",),
    fix=("reject_input", "drop_invalid_sample", "fix_upstream"),
    variable=("observations", "obs", 'r["observations"]', 'rollout["observations"]'),
    line=(
        "normalised = (obs - self.mean) / self.std",
        'log_prob, values, entropy = s.model.evaluate(s.normalizer(r["observations"]), r["actions"])',
        'observations[5, 3] = float("nan")',
    ),
)


class ObsNormalizer:
    def __init__(self, frame):
        self.mean = frame.mean(0)
        self.std = frame.std(0) + 1e-8

    def __call__(self, obs):
        normalised = (obs - self.mean) / self.std
        return normalised.clamp(-10.0, 10.0)


class ActorCritic(nn.Module):
    def __init__(self, obs_dim=6, act_dim=1):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, act_dim))
        self.vf = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(act_dim))

    def evaluate(self, obs, actions):
        mean = self.pi(obs)
        z = (actions - mean) * torch.exp(-self.log_std)
        log_prob = (-0.5 * z.pow(2) - self.log_std - 0.9189385).sum(-1)
        return log_prob, self.vf(obs).squeeze(-1), (0.5 + 0.9189385 + self.log_std).sum()


def build():
    torch.manual_seed(696)
    columns = torch.tensor([1e5, 120.0, 40.0, 55.0, 0.8, 12.0])  # cash, close, shares, rsi_30, macd, vix
    train_frame = columns * (1.0 + 0.1 * torch.randn(64, 6))
    observations = columns * (1.0 + 0.1 * torch.randn(12, 6))
    observations[5, 3] = float("nan")
    model = ActorCritic()
    rollout = {
        "observations": observations,
        "actions": torch.randn(12, 1),
        "old_log_prob": torch.full((12,), -1.3),
        "advantages": torch.randn(12),
        "returns": torch.randn(12),
    }
    return SimpleNamespace(
        model=model,
        rollout=rollout,
        normalizer=ObsNormalizer(train_frame),
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5),
    )


def run(s=None):
    s = s or build()
    r = s.rollout
    log_prob, values, entropy = s.model.evaluate(s.normalizer(r["observations"]), r["actions"])
    ratio = torch.exp(log_prob - r["old_log_prob"])
    policy_loss = -torch.min(r["advantages"] * ratio, r["advantages"] * ratio.clamp(0.8, 1.2)).mean()
    value_loss = (r["returns"] - values).pow(2).mean()
    loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss

"""lm-human-preferences: the reward model is normalised by gain = target_std / old_std, and every sampled response was the same.

Source: https://github.com/openai/lm-human-preferences (lm_human_preferences/rewards.py, set_reward_norm; train_reward.py, normalize). A policy that
answers with padding only gives 8 equal rewards: old_std is exactly 0, the gain is inf, the bias is target_mean - inf. The reward is then
inf * r - inf = NaN and with it the policy's loss.
Heals: a clamped std, keeping the old norm when the std is 0, refusing such a batch, sampling that is not degenerate. Tempting and useless:
clipping the rewards afterwards (NaN stays NaN), a larger target_std.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(),
    masked=None,
    role=("rewards", "weights"),
    fix=(
        "clamp_denominator",
        "guard_small_group",
        "reject_input",
        "fix_upstream",
        "avoid_singular_op",
        "skip_disabled_term",
        "validate_config",
        "representable_eps",
        "clamp_input",
    ),
    variable=("gain",),
    line=("gain = target_std / old_std",),
)


class RewardModel(nn.Module):
    def __init__(self, vocab=18, dim=12):
        super().__init__()
        self.backbone = nn.Embedding(vocab, dim)
        self.scalar_head = nn.Linear(dim, 1)
        nn.init.normal_(self.scalar_head.weight, std=1 / (dim + 1) ** 0.5)
        nn.init.zeros_(self.scalar_head.bias)
        self.reward_gain = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.reward_bias = nn.Parameter(torch.tensor(0.0), requires_grad=False)

    def forward(self, responses):
        pooled = self.backbone(responses).mean(1)
        reward = self.scalar_head(pooled).squeeze(-1).to(torch.bfloat16).float()  # the reward model serves bf16 scores
        return self.reward_gain * reward + self.reward_bias


def reset_reward_scale(reward_model):
    reward_model.reward_gain.data.fill_(1.0)
    reward_model.reward_bias.data.fill_(0.0)


def set_reward_norm(reward_model, old_mean, old_std, target_mean, target_std):
    gain = target_std / old_std
    bias = target_mean - gain * old_mean
    reward_model.reward_gain.data.copy_(gain)
    reward_model.reward_bias.data.copy_(bias)


@torch.no_grad()
def normalize(reward_model, responses, target_mean=0.0, target_std=1.0):
    target_mean, target_std = torch.tensor(target_mean), torch.tensor(target_std)
    reset_reward_scale(reward_model)
    rewards = reward_model(responses)
    set_reward_norm(reward_model, rewards.mean(), rewards.std(unbiased=False), target_mean, target_std)


def build():
    torch.manual_seed(18)
    policy = nn.Sequential(nn.Embedding(18, 12), nn.Tanh(), nn.Linear(12, 18))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-5, eps=1e-5)
    reward_model = RewardModel().requires_grad_(False)
    norm_responses = torch.full((8, 6), 17)  # the first samples: only padding
    rollouts = torch.randint(0, 18, (8, 7))
    return SimpleNamespace(
        policy=policy, model=policy, optimizer=optimizer, reward_model=reward_model, norm_responses=norm_responses, rollouts=rollouts
    )


def run(s=None):
    s = s or build()
    normalize(s.reward_model, s.norm_responses)
    with torch.no_grad():
        scores = s.reward_model(s.rollouts[:, 1:])
    logprobs = s.policy(s.rollouts[:, :-1]).log_softmax(-1).gather(-1, s.rollouts[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)
    loss = -(scores * logprobs).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""Uncertainty-weighted optimisation (UWO) over a reward model ensemble: mean - coeff * var of the members, and the config lists one member.

For a baseline run the list of reward models was cut down to one and the objective left at UWO. torch.var corrects with n - 1 = 0, so the variance of the single score is NaN for every sample;
the rewards, the whitened advantages and the PPO loss are NaN from the first step. (mean - 0 * var would be NaN as well: coeff 0 does not switch the term off.)

Source: https://github.com/tlc4418/llm_optimization/blob/main/src/reward_modeling/scoring/ppo_reward_functions.py (uncertainty_weighted_optimization)
Heals: no variance term for an ensemble of one (or the biased variance, which is 0), refusing the objective with fewer than two members.
Does not: coeff = 0, the epsilon of the whitening, clamping the rewards.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("var",),
    index=(0,),
    masked=None,
    role=("rewards", "hidden"),
    fix=("guard_small_group", "validate_config"),
    variable=(None,),
    line=("return torch.mean(all_scores, dim=0) - coeff * torch.var(all_scores, dim=0)",),
)


def mean_objective_function(all_scores, coeff=None):
    return torch.mean(all_scores, dim=0)


def worst_case_optimization(all_scores, coeff=None):
    return torch.min(all_scores, dim=0)[0]


def uncertainty_weighted_optimization(all_scores, coeff=1.0):
    return torch.mean(all_scores, dim=0) - coeff * torch.var(all_scores, dim=0)


OBJECTIVE_FUNCTIONS = {"mean": mean_objective_function, "WCO": worst_case_optimization, "UWO": uncertainty_weighted_optimization}


class RewardModel(nn.Module):
    def __init__(self, vocab, dim=12):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.score = nn.Linear(dim, 1)

    def forward(self, ids):
        return self.score(self.bag(ids)).squeeze(-1)


class Policy(nn.Module):
    def __init__(self, vocab, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.wte(ids)))


def get_reward(samples, reward_models, objective_function, weight):
    with torch.no_grad():
        all_scores = torch.stack([rm(samples) for rm in reward_models])
    return objective_function(all_scores, weight)


def build(members=1, objective="UWO"):
    torch.manual_seed(4)
    vocab = 30
    policy = Policy(vocab)
    reward_models = [RewardModel(vocab).eval().requires_grad_(False) for _ in range(members)]
    samples = torch.randint(0, vocab, (5, 9))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    config = {"objective_name": objective, "weight": 0.5}
    return SimpleNamespace(model=policy, optimizer=optimizer, reward_models=reward_models, config=config, batch={"samples": samples})


def run(s=None):
    s = s or build()
    ids = s.batch["samples"]
    rewards = get_reward(ids, s.reward_models, OBJECTIVE_FUNCTIONS[s.config["objective_name"]], s.config["weight"])
    advantages = (rewards - rewards.mean()) * torch.rsqrt(rewards.var() + 1e-8)
    with torch.no_grad():
        old = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    for _ in range(2):
        logp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (logp - old).exp()
        loss = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

"""An evolution strategy perturbs the weights, rolls every candidate out and standardises the rewards of the population. No candidate reaches
the goal, so every episode ends at the time limit with the same reward: the standard deviation is 0, the standardised rewards are 0 / 0 and the
update writes NaN into all weights.

Source: https://github.com/alirezamika/evostra/issues/5 (the same in https://github.com/huseinzol05/Stock-Prediction-Models/issues/43).
Heals: an epsilon in the divisor, skipping the population, centred ranks. Tempting and useless: a smaller learning rate, or clamping the
standardised rewards to [-3, 3] (a clamp keeps NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "optimizer"),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0,),
    masked=None,
    role=("rewards", "advantages"),
    fix=(
        "clamp_denominator",
        "guard_small_group",
        "skip_bad_step",
        "representable_eps",
        "drop_invalid_sample",
        "avoid_singular_op",
        "fix_upstream",
        "stable_function",
    ),
    variable=("normalized",),
    line=("normalized = (rewards - rewards.mean()) / rewards.std()",),
)


class MountainCar:
    """Always -1 a step; an episode ends at the flag or after `limit` steps."""

    def __init__(self, limit=200):
        self.limit = limit

    def rollout(self, policy):
        position, velocity, total = torch.tensor(-0.5), torch.tensor(0.0), 0.0
        for _ in range(self.limit):
            force = policy(torch.stack([position, velocity])).argmax() - 1
            velocity = (velocity + 0.001 * force - 0.0025 * torch.cos(3 * position)).clamp(-0.07, 0.07)
            position = (position + velocity).clamp(-1.2, 0.6)
            total -= 1.0
            if position >= 0.5:
                break
        return total


class EvolutionStrategy:
    def __init__(self, policy, env, population_size=10, sigma=0.02, learning_rate=0.03):
        self.policy, self.env = policy, env
        self.population_size, self.sigma = population_size, sigma
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=learning_rate)

    def get_population(self):
        return [[torch.randn_like(p) for p in self.policy.parameters()] for _ in range(self.population_size)]

    def get_rewards(self, population):
        rewards = []
        for noise in population:
            for p, e in zip(self.policy.parameters(), noise):
                p.add_(e, alpha=self.sigma)
            rewards.append(self.env.rollout(self.policy))
            for p, e in zip(self.policy.parameters(), noise):
                p.sub_(e, alpha=self.sigma)
        return torch.tensor(rewards)

    @torch.no_grad()
    def update_weights(self, rewards, population):
        normalized = (rewards - rewards.mean()) / rewards.std()
        for i, p in enumerate(self.policy.parameters()):
            noise = torch.stack([member[i] for member in population])
            p.grad = -torch.tensordot(normalized, noise, dims=1) / (self.population_size * self.sigma)
        self.optimizer.step()

    @torch.no_grad()
    def step(self):
        population = self.get_population()
        rewards = self.get_rewards(population)
        self.update_weights(rewards, population)
        return rewards.mean()


def build():
    torch.manual_seed(5)
    policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    es = EvolutionStrategy(policy, MountainCar(limit=40))
    return SimpleNamespace(model=policy, optimizer=es.optimizer, es=es)


def run(s=None):
    s = s or build()
    return s.es.step()

"""Adaptive KL controller with a target of 0 (meant as "stay at the reference"): on the first iteration policy and reference are the same
network, the measured KL is exactly 0 as well, and 0 / 0 passes the clamp into the coefficient. The second iteration trains on NaN.
Style of databricks/compose-rl, AdaptiveKLController with the torch.clamp (also TRL and OpenRLHF), rewards after TRL's
compute_rewards.

Checked by hand: a positive target, or the fixed controller for target 0, heals (so does a floor under the target). The clamp to +-0.2 that
is there does not stop a NaN. With a KL above 0 the same setting is harmless: inf is clamped to 0.2.
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("kl", "rewards"),
    fix=("validate_config", "clamp_denominator"),
    variable=(None,),
    line=("proportional_error = torch.clamp(current / target - 1, min=-0.2, max=0.2)",),
)


class AdaptiveKLController:
    def __init__(self, init_kl_coef, target, horizon):
        self._value, self._target, self._horizon = init_kl_coef, target, horizon

    def update(self, current, n_steps):
        target = self._target
        proportional_error = torch.clamp(current / target - 1, min=-0.2, max=0.2)
        mult = float(1 + proportional_error * n_steps / self._horizon)
        self._value *= mult

    @property
    def value(self):
        return self._value


class Policy(nn.Module):
    def __init__(self, vocab=15, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.body = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.head = nn.Linear(dim, vocab)

    def logprobs(self, ids):
        logp = torch.log_softmax(self.head(self.body(self.embed(ids[:, :-1]))), dim=-1)
        return logp.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)


def compute_rewards(scores, kls, mask, kl_coef):
    rewards = -kl_coef * kls
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards * mask


def discounted_returns(rewards, gamma=0.99):
    out, running = [], torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        out.append(running)
    return torch.stack(out[::-1], dim=1)


def build():
    torch.manual_seed(1909)
    policy = Policy()
    ref = copy.deepcopy(policy).requires_grad_(False)
    mask = torch.ones(4, 7)
    mask[2, 5:] = 0
    return SimpleNamespace(
        model=policy,
        ref=ref,
        kl_ctl=AdaptiveKLController(init_kl_coef=0.2, target=0.0, horizon=10000),
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-3),
        batches=[torch.randint(0, 15, (4, 8)) for _ in range(2)],
        scores=[torch.randn(4) for _ in range(2)],
        mask=mask,
    )


def run(s=None):
    s = s or build()
    for ids, scores in zip(s.batches, s.scores):
        log_probs = s.model.logprobs(ids)
        kls = log_probs.detach() - s.ref.logprobs(ids)
        returns = discounted_returns(compute_rewards(scores, kls, s.mask, s.kl_ctl.value))
        advantages = returns - returns.mean()
        loss = -(advantages * log_probs * s.mask).sum() / s.mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        mean_kl = (kls * s.mask).sum(1).mean()
        s.kl_ctl.update(mean_kl, n_steps=len(scores))
    return loss

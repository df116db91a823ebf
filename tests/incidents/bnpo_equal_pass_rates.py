"""BNPO (beta normalisation policy optimisation): the beta distribution is fitted to the pass rates of the prompts, and all pass rates are equal.

The moments fit divides by the variance of the per-prompt mean rewards: a = (m (1 - m) / var - 1) m. With a curriculum that keeps only prompts solved half of the time every
pass rate of the batch is 0.5, var is 0 and a is +inf (the clamp has a lower bound only). The log-density of Beta(inf, inf) is inf - inf = NaN, the weight 1 / NaN stays NaN through its clamp,
and so do all advantages. The guard `if all_p.shape[0] > 1` protects against a single prompt only.

Source: https://github.com/changyi7231/BNPO/blob/main/recipe/bnpo/src/bnpo_ray_trainer.py (compute_bnpo_outcome_advantage)
Heals: a floor under the variance, an upper bound in the clamp of alpha and beta, falling back to weight 1 when the pass rates do not differ.
Does not: the clamp of alpha and beta at 1 from below, the clamp of the weight, dropping prompts that are solved always or never.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "inf_minus_inf"),
    op=("div",),
    index=(),
    masked=None,
    role=("advantages", "rewards", "hidden"),
    fix=("clamp_denominator", "guard_small_group", "clamp_input", "avoid_singular_op"),
    variable=(None,),
    line=("a = (p_mean * (1 - p_mean) / p_var - 1) * p_mean",),
)


class Actor(nn.Module):
    def __init__(self, vocab=20, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.out(self.norm(self.embed(tokens)))


@torch.no_grad()
def compute_bnpo_outcome_advantage(token_level_rewards, eos_mask, index, min_value=0.0, max_value=1.0):
    response_length = token_level_rewards.shape[-1]
    scores = token_level_rewards.sum(dim=-1)
    scores = (scores - min_value) / (max_value - min_value)
    id2score = defaultdict(list)
    for i, uid in enumerate(index):
        id2score[uid].append(scores[i])
    id2mean = {uid: torch.stack(group).mean() for uid, group in id2score.items()}

    all_p = torch.stack(list(id2mean.values()))
    p_mean = all_p.mean()
    p_var = all_p.var() if all_p.shape[0] > 1 else torch.tensor(1.0)
    a = (p_mean * (1 - p_mean) / p_var - 1) * p_mean
    b = (p_mean * (1 - p_mean) / p_var - 1) * (1 - p_mean)
    alpha = torch.clamp(1 + a / 3, min=1.0)
    beta = torch.clamp(1 + b / 3, min=1.0)
    for i, uid in enumerate(index):
        p = id2mean[uid]
        density = torch.distributions.Beta(alpha, beta).log_prob(p).exp()
        weight = torch.clamp(1 / density, min=0, max=1e6)
        scores[i] = weight * (scores[i] - p)
    return scores.unsqueeze(-1).tile([1, response_length]) * eos_mask


def build():
    torch.manual_seed(5)
    actor = Actor()
    tokens = torch.randint(0, 20, (12, 7))
    eos_mask = torch.ones(12, 6)
    for row, length in enumerate([6, 4, 5, 6, 3, 6, 6, 2, 5, 6, 4, 6]):
        eos_mask[row, length:] = 0
    rewards = torch.zeros(12, 6)
    rewards[torch.tensor([0, 3, 4, 7, 9, 10]), 0] = 1.0  # two of four answers are right, for every prompt
    index = [f"prompt-{row // 4}" for row in range(12)]
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    return SimpleNamespace(
        model=actor, optimizer=optimizer, batch={"tokens": tokens, "rewards": rewards, "eos_mask": eos_mask, "uid": index}
    )


def run(s=None):
    s = s or build()
    advantages = compute_bnpo_outcome_advantage(s.batch["rewards"], s.batch["eos_mask"], s.batch["uid"])
    tokens, mask = s.batch["tokens"], s.batch["eos_mask"]
    old = None
    for _ in range(2):
        logp = s.model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        old = logp.detach() if old is None else old
        ratio = torch.exp(logp - old)
        pg = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = (pg * mask).sum() / mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

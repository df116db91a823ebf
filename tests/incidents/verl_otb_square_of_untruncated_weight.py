"""verl's optimal token baseline with rollout correction: the baseline is weighted by the square of the importance weight, and that overflows.

OTB weighs the reward-to-go of every trajectory of a group with rho^2 * W_t, made for truncated importance weights. Here rollout_is_threshold was set
to null, because the policy loss truncates at 2 on its own. One response was sampled by an engine two versions behind; its sequence weight
exp(sum of log ratios) is about 6e20, a finite number, and its square is inf. All is under no_grad: the baseline becomes inf * 0 / inf = NaN for every
member of the group, the advantages NaN, then the loss.
Source: https://github.com/verl-project/verl/blob/main/verl/trainer/ppo/core_algos.py (compute_optimal_token_baseline_advantage), docs/algo/otb.md.
Heals: truncate the weights (or the summed log ratio) before they are squared; form the weighted mean with weights relative to the largest.
Does not: the epsilon in the denominator, truncation in the policy loss, masking (the tokens count), clipping the norm.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow",),
    op=("pow", "square"),
    index=(2, 0),
    masked=False,
    role=("is_weight", "ratio"),
    fix=("clamp_input", "clamp_exponent", "stable_function", "validate_config", "drop_invalid_sample"),
    variable=(None,),
    line=("w_per_timestep = w_per_timestep * (rollout_is_weights**2)",),
)


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.ff = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        e = self.emb(ids)
        prev = torch.roll(e, 1, dims=1)
        return self.out(torch.tanh(self.ff(torch.cat([e, prev], -1))))


def log_prob_and_sum_pi_squared(actor, ids):
    logits = actor(ids[:, :-1])
    log_prob = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    sum_pi_squared = torch.exp(torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1))
    return log_prob, sum_pi_squared


@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights=None, epsilon=1e-8
):
    returns = (token_level_rewards * response_mask).flip(dims=[-1]).cumsum(dim=-1).flip(dims=[-1])
    pi_t = torch.exp(old_log_probs)
    w_per_timestep = 1 - 2 * pi_t + sum_pi_squared
    if rollout_is_weights is not None:
        w_per_timestep = w_per_timestep * (rollout_is_weights**2)
    w_cumulative = (w_per_timestep * response_mask).cumsum(dim=-1)

    groups = defaultdict(list)
    for i, uid in enumerate(index):
        groups[uid].append(i)
    baselines = torch.zeros_like(returns)
    for rows in groups.values():
        if len(rows) == 1:
            continue
        rows = torch.tensor(rows)
        weight = w_cumulative[rows] * response_mask[rows]
        baselines[rows] = (returns[rows] * weight).sum(0) / (weight.sum(0) + epsilon)
    return (returns - baselines) * response_mask, returns


def build():
    torch.manual_seed(29)
    actor = Actor()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
    ids = torch.randint(0, 16, (6, 41))
    lengths = torch.tensor([30, 40, 38, 25, 40, 33])
    response_mask = (torch.arange(40)[None] < lengths[:, None]).float()
    rewards = torch.zeros(6, 40)
    rewards[torch.arange(6), lengths - 1] = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    with torch.no_grad():
        old_log_probs, sum_pi_squared = log_prob_and_sum_pi_squared(actor, ids)
    rollout_log_probs = old_log_probs + 0.02 * torch.randn(6, 40)
    rollout_log_probs[2] -= 1.26  # the stale engine
    batch = dict(ids=ids, response_mask=response_mask, token_level_rewards=rewards, uid=["a", "a", "a", "b", "b", "b"])
    batch.update(old_log_probs=old_log_probs, sum_pi_squared=sum_pi_squared, rollout_log_probs=rollout_log_probs)
    return SimpleNamespace(model=actor, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    mask = b["response_mask"]
    seq_log_weight = ((b["old_log_probs"] - b["rollout_log_probs"]) * mask).sum(-1, keepdim=True)
    rollout_is_weights = torch.exp(seq_log_weight).expand_as(mask)  # rollout_is: sequence, rollout_is_threshold: null
    advantages, _ = compute_optimal_token_baseline_advantage(
        b["token_level_rewards"], mask, b["uid"], b["old_log_probs"], b["sum_pi_squared"], rollout_is_weights
    )
    log_prob, _ = log_prob_and_sum_pi_squared(s.model, b["ids"])
    ratio = torch.exp(log_prob - b["old_log_probs"])
    pg_losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * rollout_is_weights.clamp(max=2.0)
    pg_loss = (pg_losses * mask).sum() / mask.sum()
    s.optimizer.zero_grad()
    pg_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return pg_loss.item(), rollout_is_weights.max().item()


if __name__ == "__main__":
    print(run())

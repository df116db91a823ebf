"""verl GPG advantage: every advantage is scaled by batch size over the number of non-zero rewards. In a batch where no answer is right that
is bsz / 0 = inf, all centred scores are 0, inf * 0 is NaN and every advantage of the batch is NaN.

https://github.com/verl-project/verl (verl/trainer/ppo/core_algos.py, compute_gpg_outcome_advantage; upstream has `m.clamp(min=1)`, here it is
missing as in a port of the formula). Heals: clamp the count at 1, or leave a batch without reward out. Tempting and useless: an epsilon on
f_norm, masking the advantages by response_mask.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "zero_div_zero", "inf_times_zero_coef"),
    op=("reciprocal", "div"),
    index=(),
    masked=None,
    role=("advantages", "rewards"),
    fix=("clamp_denominator", "guard_empty", "representable_eps"),
    variable=("alpha", None),
    line=("alpha = bsz / m",),
)


class Actor(nn.Module):
    def __init__(self, vocab=28, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + torch.tanh(self.block(hidden)))


def compute_gpg_outcome_advantage(token_level_rewards, response_mask, index, f_norm=1.0):
    scores = token_level_rewards.sum(dim=-1)
    id2score, id2mean = defaultdict(list), {}
    with torch.no_grad():
        bsz = scores.shape[0]
        m = torch.count_nonzero(scores)
        alpha = bsz / m
        for i in range(bsz):
            id2score[index[i]].append(scores[i])
        for idx, group in id2score.items():
            id2mean[idx] = torch.stack(group).mean() if len(group) > 1 else torch.tensor(0.0)
        baseline = torch.stack([id2mean[i] for i in index])
        scaled = alpha * (scores - baseline) / f_norm
        advantages = scaled.unsqueeze(-1) * response_mask
    return advantages, advantages


def compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, cliprange=0.2):
    ratio = torch.exp((log_prob - old_log_prob).clamp(-20.0, 20.0))
    pg_losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))
    return (pg_losses * response_mask).sum() / response_mask.sum()


def get_log_prob(actor, input_ids):
    logits = actor(input_ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(405)
    actor = Actor()
    responses = torch.randint(0, 28, (6, 8))
    response_mask = torch.ones(6, 7)
    response_mask[4, 5:] = 0.0
    index = ["p0", "p0", "p0", "p1", "p1", "p1"]
    token_level_rewards = torch.zeros(6, 7)  # two hard prompts: all six answers are wrong
    with torch.no_grad():
        old_log_prob = get_log_prob(actor, responses)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
    return SimpleNamespace(
        model=actor,
        optimizer=optimizer,
        responses=responses,
        response_mask=response_mask,
        index=index,
        token_level_rewards=token_level_rewards,
        old_log_prob=old_log_prob,
    )


def run(s=None):
    s = s or build()
    advantages, _ = compute_gpg_outcome_advantage(s.token_level_rewards, s.response_mask, s.index)
    log_prob = get_log_prob(s.model, s.responses)
    pg_loss = compute_policy_loss(s.old_log_prob, log_prob, advantages, s.response_mask)
    s.optimizer.zero_grad()
    pg_loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return pg_loss


if __name__ == "__main__":
    print("loss", run().item())

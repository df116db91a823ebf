"""verl's OPO advantage subtracts a length-weighted baseline: sum(len * score) / sum(len) over the responses of one prompt.

The prompt of the second group was too long for the server, all of its responses came back aborted and empty: the lengths sum to 0 and the
baseline is 0/0. Multiplying the advantages by the response mask, which is 0 on every one of those tokens, keeps the NaN, and the mean over
the batch spreads it.

Source: https://github.com/verl-project/verl/blob/main/verl/trainer/ppo/core_algos.py (compute_opo_outcome_advantage)
Heals: leaving such a group out, or a baseline with a clamped sum of lengths. Does not: masking the advantages once more before the loss.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(),
    masked=None,
    role=("rewards", "advantages"),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample"),
    variable=("baseline",),
    line=("baseline = (len_tensor * score_tensor).sum() / len_tensor.sum()",),
)

PROMPT_LEN = 4


class Actor(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        hidden, _ = self.gru(self.embed_tokens(input_ids))
        return self.lm_head(hidden)


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


@torch.no_grad()
def compute_opo_outcome_advantage(token_level_rewards, response_mask, index):
    response_length = response_mask.sum(dim=-1)
    scores = token_level_rewards.sum(dim=-1)
    id2score, id2len, id2bsl = defaultdict(list), defaultdict(list), {}
    for i in range(scores.shape[0]):
        id2score[index[i]].append(scores[i])
        id2len[index[i]].append(response_length[i])
    for idx in id2score:
        if len(id2score[idx]) == 1:
            id2bsl[idx] = torch.tensor(0.0)
        else:
            score_tensor = torch.stack(id2score[idx])
            len_tensor = torch.stack(id2len[idx])
            baseline = (len_tensor * score_tensor).sum() / len_tensor.sum()
            id2bsl[idx] = baseline
    scores = torch.stack([scores[i] - id2bsl[index[i]] for i in range(len(index))])
    return scores.unsqueeze(-1) * response_mask


def compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, cliprange=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - cliprange, 1 + cliprange)
    return masked_mean(torch.maximum(pg_losses1, pg_losses2), response_mask)


def build():
    torch.manual_seed(2103)
    actor = Actor()
    input_ids = torch.randint(1, 20, (6, PROMPT_LEN + 5))
    lengths = torch.tensor([5, 3, 0, 0, 4, 5])
    response_mask = (torch.arange(5) < lengths[:, None]).float()
    token_level_rewards = torch.zeros(6, 5)
    for row, score in enumerate([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]):
        token_level_rewards[row, max(int(lengths[row]) - 1, 0)] = score
    uid = ["p0", "p0", "p1", "p1", "p2", "p2"]
    return SimpleNamespace(
        model=actor,
        actor=actor,
        input_ids=input_ids,
        response_mask=response_mask,
        uid=uid,
        token_level_rewards=token_level_rewards,
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-5),
    )


def run(s=None):
    s = s or build()
    advantages = compute_opo_outcome_advantage(s.token_level_rewards, s.response_mask, s.uid)
    responses = s.input_ids[:, PROMPT_LEN:]
    logits = s.actor(s.input_ids)[:, PROMPT_LEN - 1 : -1]
    log_prob = logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)
    old_log_prob = log_prob.detach() + 0.01
    pg_loss = compute_policy_loss(old_log_prob, log_prob, advantages, s.response_mask)
    s.optimizer.zero_grad()
    pg_loss.backward()
    s.optimizer.step()
    return pg_loss

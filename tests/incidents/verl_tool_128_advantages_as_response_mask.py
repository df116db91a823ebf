"""verl-tool: every policy loss except the vanilla one got `response_mask=advantages`, and the policy loss became NaN or inf.

The token mean then divides by the sum of the advantages instead of the number of response tokens. In a group of GRPO with as many right as wrong
answers, all cut at the same length, that sum is exactly 0: the loss is -x / 0 = -inf and so are the gradients.

Source: https://github.com/TIGER-AI-Lab/verl-tool/issues/128 (verl/workers/actor/dp_actor.py line 515)
Heals: passing the response mask (the real repair); a floor under the token count keeps it finite. Does not: clipping the ratio, clipping the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "empty_mask_mean"),
    op=("div", "true_divide", "truediv"),
    index=(),
    masked=None,
    role=("loss",),
    fix=("fix_upstream", "clamp_denominator", "guard_empty"),
    variable=("loss", "pg_loss"),
    line=("loss = masked_sum(loss_mat, loss_mask) / batch_num_tokens",),
)


def masked_sum(values, mask):
    valid_values = torch.where(mask.bool(), values, torch.zeros_like(values))
    return (valid_values * mask).sum()


def agg_loss(loss_mat, loss_mask):
    batch_num_tokens = loss_mask.sum()
    loss = masked_sum(loss_mat, loss_mask) / batch_num_tokens
    return loss


def compute_policy_loss_clip_cov(old_log_prob, log_prob, advantages, response_mask, low=0.2, high=0.28):
    negative_approx_kl = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    ratio = torch.exp(negative_approx_kl)
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    return agg_loss(torch.maximum(pg_losses1, pg_losses2), response_mask)


POLICY_LOSSES = {"clip_cov": compute_policy_loss_clip_cov}


def grpo_outcome_advantage(scores, response_mask, epsilon=1e-6):
    adv = (scores - scores.mean()) / (scores.std() + epsilon)
    return adv[:, None] * response_mask


def build():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(18, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 18))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 18, (4, 9))
    response_mask = torch.ones(4, 8)  # all four ran into max_response_length
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0])
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, response_mask=response_mask, scores=scores, loss_mode="clip_cov")


def run(s=None):
    s = s or build()
    advantages = grpo_outcome_advantage(s.scores, s.response_mask)
    log_prob = F.log_softmax(s.model(s.ids[:, :-1]), -1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    old_log_prob = log_prob.detach()
    policy_loss_fn = POLICY_LOSSES[s.loss_mode]
    pg_loss = policy_loss_fn(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=advantages)
    s.optimizer.zero_grad()
    pg_loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return pg_loss


if __name__ == "__main__":
    print(run())

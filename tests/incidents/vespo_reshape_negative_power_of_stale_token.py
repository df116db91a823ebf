"""VESPO's IS reshape (verl recipe) - separate powers of the importance weight for good and for bad responses, chosen by torch.where.

Positive advantages take w ** gamma_pos with gamma_pos < 1, negative ones w ** gamma_neg with 1 < gamma_neg < 2; both powers are computed
for every token. A stale token of a good response has log w = 50: w ** 0.05 is a modest 12, w ** 1.99 is inf in the branch that is not
taken. The loss is finite, backward multiplies the 0 of the where by the inf of the exp. Source:
https://github.com/FloyedShen/VESPO/blob/main/recipe/is_shape/code/core_algos.py (`is_reshape_v7`). Choosing the exponent before the exp or
clamping it heals; nan_to_num on the weight that is not used does not.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "exp_overflow"),
    op=("exp",),
    index=(0, 3),
    masked=True,
    role=("is_weight", "ratio"),
    fix=("mask_before_op", "clamp_exponent", "where_on_detached"),
    variable=("w_neg",),
    line=("w_neg = torch.exp(gamma_neg * log_w)",),
)


@torch.no_grad()
def reshape_gammas(log_w, advantages, response_mask, rho_min=0.3):
    def power(selected, low, high):
        if selected.numel() < 2:
            return (low + high) / 2
        sigma_sq = selected.var().item()
        return max(low, min(high, math.sqrt(-math.log(rho_min) / max(sigma_sq, 1e-8))))

    valid = response_mask > 0
    gamma_pos = power(log_w[valid & (advantages > 0)], 0.05, 0.99)
    gamma_neg = 1.0 + power(log_w[valid & (advantages < 0)], 0.01, 0.99)
    return gamma_pos, gamma_neg


def policy_loss_is_reshape(old_log_prob, log_prob, advantages, response_mask):
    log_w = log_prob - old_log_prob
    gamma_pos, gamma_neg = reshape_gammas(log_w, advantages, response_mask)
    w_pos = torch.exp(gamma_pos * log_w)
    w_neg = torch.exp(gamma_neg * log_w)
    surrogate = torch.where(advantages > 0, w_pos / gamma_pos, w_neg / gamma_neg)
    pg_losses = -advantages * surrogate
    return (pg_losses * response_mask).sum() / response_mask.sum()


class TinyLM(nn.Module):
    def __init__(self, vocab=20, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def compute_log_prob(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(77)
    model = TinyLM()
    ids = torch.randint(0, 20, (4, 8))
    with torch.no_grad():
        old_log_prob = compute_log_prob(model, ids) + 0.01 * torch.randn(4, 7)
    old_log_prob[0, 3] -= 50.0  # sampled by weights that are many versions old
    response_mask = torch.ones(4, 7)
    response_mask[1, 5:] = 0
    advantages = torch.tensor([1.0, -0.6, 0.5, -0.9]).unsqueeze(1).expand(4, 7)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        ids=ids,
        old_log_prob=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
    )


def run(s=None):
    s = s or build()
    loss = policy_loss_is_reshape(s.old_log_prob, compute_log_prob(s.model, s.ids), s.advantages, s.response_mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

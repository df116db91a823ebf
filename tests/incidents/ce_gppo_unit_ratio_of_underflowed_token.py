"""CE-GPPO keeps the gradient of clipped tokens by `ratio / ratio.detach()` times the clip bound, chosen with torch.where.

A stale token of a good answer has a log-prob of about -110 under the policy now, its ratio underflows to 0. Its advantage is positive, so the
where takes the plain `ratio * adv` and the loss is finite; the branch that was not taken holds 0 / 0, and its backward is 0 / 0 as well: the
gradient of that logit, and with it every weight, is NaN.

Source: https://github.com/Kwai-Klear/CE-GPPO (README, compute_gppo_loss_general_beta) and
https://github.com/Spi1er/Clipping-Aware-Policy-Optimization-Comparison-Suite/blob/main/trainer/train_cegppo.py
Heals: exp(log_ratio - log_ratio.detach()) instead of the quotient; a clamp of the log ratio; the quotient taken of the clipped tokens only; a floor
under the denominator. Does not: nan_to_num on the branch, or on the loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "zero_div_zero"),
    op=("div", "true_divide", "truediv"),
    index=(1, 3),
    masked=True,
    role=("ratio", "is_weight"),
    fix=(
        "stable_function",
        "clamp_exponent",
        "mask_before_op",
        "clamp_denominator",
        "avoid_singular_op",
        "where_on_detached",
        "clamp_input",
    ),
    variable=("unit",),
    line=("unit = ratio / ratio.detach()",),
)


class Policy(nn.Module):
    def __init__(self, vocab=12, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.mlp = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        return self.lm_head(h + torch.tanh(self.mlp(h)))


def cegppo_loss(per_token_logps, old_per_token_logps, advantages, completion_mask, eps=0.2, beta1=0.75, beta2=1.0):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    adv = advantages.unsqueeze(1)
    mask_nalp = (ratio < 1.0 - eps) & (adv < 0.0)
    mask_palp = (ratio > 1.0 + eps) & (adv > 0.0)
    unit = ratio / ratio.detach()
    nalp_obj = beta1 * (1.0 - eps) * unit * adv
    palp_obj = beta2 * (1.0 + eps) * unit * adv
    obj = torch.where(mask_nalp, nalp_obj, torch.where(mask_palp, palp_obj, ratio * adv))
    return -((obj * completion_mask).sum(1) / completion_mask.sum(1).clamp(min=1)).mean()


def build():
    torch.manual_seed(11)
    model = Policy()
    ids = torch.randint(0, 11, (4, 7))
    ids[1, 4] = 11
    with torch.no_grad():
        model.lm_head.bias[11] = -112.0  # since the rollout the policy has given this token up
    completion_mask = torch.ones(4, 6)
    completion_mask[2, 4:] = 0.0
    with torch.no_grad():
        logps = F.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    old_logps = logps + 0.3 * torch.randn(4, 6)
    old_logps[1, 3] = -0.9
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(
        model=model, optimizer=optimizer, ids=ids, old_logps=old_logps, advantages=advantages, completion_mask=completion_mask
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[:, :-1])
    per_token_logps = F.log_softmax(logits, dim=-1).gather(-1, s.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    loss = cegppo_loss(per_token_logps, s.old_logps, s.advantages, s.completion_mask)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""VAPO's length-adaptive GAE, lambda = 1 - 1 / (alpha * length), in a batch that holds an aborted rollout of length 0.

The empty response is kept in the batch with an all-zero mask. Its lambda is 1 - 1 / 0 = -inf, the first step of its GAE is -inf * 0 = NaN, and
masked whitening multiplies that row by 0: mean, variance and all advantages become NaN.

Source: https://github.com/areal-project/AReaL areal/trainer/ppo/lambda_fn.py (vapo_length_adaptive_gae, which guards length 0; here without the guard),
VAPO, arXiv 2504.05118
Heals: a length of at least 1 in the quotient, a guard for empty responses, leaving the row out. Does not: multiplying the advantages by the mask
before whitening, a larger alpha.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "inf_times_zero_mask", "nan_times_zero_mask", "inf_times_zero_coef"),
    op=("reciprocal", "div", "__rtruediv__", "true_divide", "truediv", "mul"),
    index=(1,),
    masked=True,
    role=("advantages",),
    fix=("clamp_denominator", "guard_empty", "mask_before_op", "drop_invalid_sample", "clamp_input", "avoid_singular_op"),
    variable=(None, "lam"),
    line=("lam = 1.0 - 1.0 / (alpha * lengths)",),
)


def length_adaptive_lambda(lengths, alpha):
    lam = 1.0 - 1.0 / (alpha * lengths)
    return lam


def masked_whiten(values, mask, eps=1e-8):
    n = mask.sum()
    mean = (values * mask).sum() / n
    var = ((values - mean) ** 2 * mask).sum() / n
    return (values - mean) * torch.rsqrt(var + eps)


@torch.no_grad()
def decoupled_gae(rewards, values, mask, gamma=1.0, alpha=0.5):
    lam = length_adaptive_lambda(mask.sum(1), alpha)
    last = torch.zeros(rewards.shape[0])
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        nextvalues = values[:, t + 1] * mask[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros(rewards.shape[0])
        delta = (rewards[:, t] + gamma * nextvalues - values[:, t]) * mask[:, t]
        last = delta + gamma * lam * last
        advantages[:, t] = last
    returns = (rewards * mask).flip(1).cumsum(1).flip(1)  # lambda of the critic is 1
    return masked_whiten(advantages, mask), returns


class ActorCritic(nn.Module):
    def __init__(self, vocab=20, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab)
        self.value_head = nn.Linear(hidden, 1)

    def forward(self, ids):
        h = torch.tanh(self.embed(ids))
        return self.lm_head(h), self.value_head(h).squeeze(-1)


def build():
    torch.manual_seed(17)
    model = ActorCritic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 20, (4, 11))
    lengths = torch.tensor([7, 0, 10, 5])  # the second request was aborted before its first token
    mask = (torch.arange(10)[None] < lengths[:, None]).float()
    rewards = torch.zeros(4, 10)
    for i, n in enumerate(lengths.tolist()):
        if n:
            rewards[i, n - 1] = float(i != 3)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, mask=mask, rewards=rewards)


def run(s=None):
    s = s or build()
    logits, values = s.model(s.ids[:, :-1])
    advantages, returns = decoupled_gae(s.rewards, values.detach(), s.mask)
    log_probs = F.log_softmax(logits, -1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    ratio = torch.exp(log_probs - log_probs.detach())
    pg = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    pg_loss = (pg * s.mask).sum() / s.mask.sum()
    vf_loss = 0.5 * ((values - returns) ** 2 * s.mask).sum() / s.mask.sum()
    loss = pg_loss + 0.5 * vf_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

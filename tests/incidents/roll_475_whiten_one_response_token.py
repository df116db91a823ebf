"""ROLL #475 (https://github.com/alibaba/ROLL/issues/475, fixed by pull 476): advantages are whitened with the unbiased variance. Response
filtering left exactly one valid token in the batch, so Bessel's correction n / (n - 1) divides by zero. (ROLL raises here; this trainer
took the helper over without the exception.)

Heals: no whitening when fewer than two tokens are left. Does not heal: a larger eps in rsqrt(var + eps), the variance is NaN before it.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single", "zero_denominator"),
    op=("div",),
    index=(),
    masked=None,
    role=("advantages",),
    fix=("guard_small_group", "clamp_denominator", "avoid_singular_op"),
    variable=("bessel_correction",),
    line=("bessel_correction = mask_sum / (mask_sum - 1)",),
)


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


def masked_var(values, mask, unbiased=True):
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean).square(), mask)
    if unbiased:
        mask_sum = mask.sum()
        bessel_correction = mask_sum / (mask_sum - 1)
        variance = variance * bessel_correction
    return variance


def masked_whiten(values, mask, shift_mean=True, eps=1e-8):
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(var + eps)
    if not shift_mean:
        whitened = whitened + mean
    return whitened


def compute_reinforce_return(token_level_rewards, gamma):
    returns = torch.zeros_like(token_level_rewards)
    running = torch.zeros(token_level_rewards.size(0))
    for t in reversed(range(token_level_rewards.size(1))):
        running = token_level_rewards[:, t] + gamma * running
        returns[:, t] = running
    return returns


def compute_advantage(data, gamma, whiten_advantages):
    response_mask = data["response_mask"].float()
    if response_mask.sum() == 0:
        whiten_advantages = False
    with torch.no_grad():
        returns = compute_reinforce_return(data["token_level_rewards"], gamma)
        advantages = returns * response_mask
        if whiten_advantages:
            advantages = masked_whiten(advantages, response_mask)
        advantages = advantages * response_mask
    return advantages


class Actor(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.norm(self.embed(input_ids)))


def build():
    torch.manual_seed(475)
    model = Actor()
    input_ids = torch.randint(0, 24, (3, 8))
    response_mask = torch.zeros(3, 7, dtype=torch.long)
    response_mask[1, 4] = 1  # every other trajectory was filtered out, this one stopped at once
    rewards = torch.zeros(3, 7)
    rewards[1, 4] = 1.0
    data = {"input_ids": input_ids, "response_mask": response_mask, "token_level_rewards": rewards}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), data=data)


def run(s=None):
    s = s or build()
    advantages = compute_advantage(s.data, gamma=1.0, whiten_advantages=True)
    logits = s.model(s.data["input_ids"][:, :-1])
    log_probs = logits.log_softmax(-1).gather(-1, s.data["input_ids"][:, 1:, None]).squeeze(-1)
    ratio = (log_probs - log_probs.detach()).exp()
    pg_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    mask = s.data["response_mask"].float()
    loss = (pg_loss * mask).sum() / (mask.sum() + 1e-8)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())

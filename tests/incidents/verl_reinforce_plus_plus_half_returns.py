"""verl `compute_reinforce_plus_plus_outcome_advantage` on rewards that the rollout worker kept in float16.

A game agent gets its score as a dense reward, some 600 points a step. The worker stores token_level_rewards in the model's dtype, and the
running return is accumulated from the end in that dtype: after about 110 steps it passes 65504 and is inf. The masked whitening of the
returns is inf - inf = NaN for the whole batch.
Source: https://github.com/verl-project/verl/blob/main/verl/trainer/ppo/core_algos.py `compute_reinforce_plus_plus_outcome_advantage`.
Heals: accumulating in float32. Does not: converting the returns to float32 before the whitening, when they are inf already.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("add",),
    index=(1,),
    masked=False,
    role=("rewards", "advantages"),
    fix=("upcast_fp32",),
    variable=("running_return",),
    line=("running_return = token_level_rewards[:, t] + gamma * running_return",),
)


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


def masked_whiten(values, mask):
    mean = masked_mean(values, mask)
    var = masked_mean((values - mean) ** 2, mask)
    return (values - mean) * torch.rsqrt(var + 1e-8)


@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(token_level_rewards, response_mask, gamma):
    returns = torch.zeros_like(token_level_rewards)
    running_return = torch.zeros_like(token_level_rewards[:, 0])
    for t in reversed(range(token_level_rewards.shape[1])):
        running_return = token_level_rewards[:, t] + gamma * running_return
        returns[:, t] = running_return
        running_return = running_return * response_mask[:, t]  # reset after EOS
    advantages = masked_whiten(returns.float(), response_mask.float()) * response_mask
    return advantages, returns


class Actor(nn.Module):
    def __init__(self, vocab=12, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def build():
    torch.manual_seed(2116)
    actor = Actor()
    responses = torch.randint(0, 12, (4, 129))
    lengths = torch.tensor([60, 128, 96, 30])
    response_mask = (torch.arange(128) < lengths[:, None]).half()
    token_level_rewards = (600.0 + 20.0 * torch.randn(4, 128)).half() * response_mask
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-6)
    return SimpleNamespace(
        model=actor,
        optimizer=optimizer,
        responses=responses,
        response_mask=response_mask,
        token_level_rewards=token_level_rewards,
        gamma=1.0,
        cliprange=0.2,
    )


def run(s=None):
    s = s or build()
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(s.token_level_rewards, s.response_mask, s.gamma)
    log_prob = s.model(s.responses[:, :-1]).log_softmax(-1).gather(-1, s.responses[:, 1:, None]).squeeze(-1)
    ratio = torch.exp(log_prob - log_prob.detach())
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - s.cliprange, 1 + s.cliprange)
    pg_loss = masked_mean(torch.maximum(pg_losses1, pg_losses2), s.response_mask.float())
    s.optimizer.zero_grad()
    pg_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return pg_loss

"""PPO with a value head (the first TRL trainer) in pure fp16; the reward model hands out raw, unscaled scores.

Scores of a few hundred fit into fp16, and with gamma = lam = 1 so does every advantage. Their sum over the 192 response tokens does not: it is beyond 65504, the masked
mean is inf, advantage - mean is -inf, the variance inf, and whitening gives -inf * rsqrt(inf) = -inf * 0 = NaN. Loss and weights are NaN after the step.

Source: https://github.com/hiyouga/LlamaFactory/issues/551 (PPO: the loss is nan throughout with --fp16; reward models train in bf16), trl core.py masked_mean, masked_whiten.
Heals: whitening in float32, scaled rewards, a mean that divides before it sums.  Does not: clipping the ratio or the whitened advantage, an epsilon in rsqrt, gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("sum",),
    index=(),
    masked=None,
    role=("advantages", "hidden"),
    fix=("upcast_fp32", "fix_upstream", "stable_function"),
    variable=(None,),
    line=("return (values * mask).sum() / mask.sum()",),
)


class PolicyWithValueHead(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.v_head = nn.Linear(dim, 1)

    def forward(self, ids):
        h = torch.tanh(self.fc(self.wte(ids)))
        return self.lm_head(h), self.v_head(h).squeeze(-1)


def logprobs_from_logits(logits, labels):
    return torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def masked_whiten(values, mask):
    mean = masked_mean(values, mask)
    var = masked_mean((values - mean) ** 2, mask)
    return (values - mean) * torch.rsqrt(var + 1e-8)


def clip_by_value(x, low, high):
    return torch.max(torch.min(x, high), low)


@torch.no_grad()
def compute_advantages(values, rewards, mask, gamma=1.0, lam=1.0):
    lastgaelam, advantages_reversed = 0, []
    values, rewards = values * mask, rewards * mask
    for t in reversed(range(rewards.shape[1])):
        nextvalues = values[:, t + 1] if t < rewards.shape[1] - 1 else 0.0
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = delta + gamma * lam * lastgaelam
        advantages_reversed.append(lastgaelam)
    advantages = torch.stack(advantages_reversed[::-1]).transpose(0, 1)
    returns = advantages + values
    return advantages, returns


def build():
    torch.manual_seed(551)
    model = PolicyWithValueHead().half()
    queries = torch.randint(0, 32, (3, 64))
    mask = torch.ones(3, 64, dtype=torch.half)
    rewards = torch.zeros(3, 64, dtype=torch.half)
    for row, score in enumerate((365.0, 420.0, 388.0)):
        rewards[row, -1] = score
    with torch.no_grad():
        logits, values = model(queries)
        old_logprobs = logprobs_from_logits(logits, queries.roll(-1, 1))
    advantages, returns = compute_advantages(values, rewards, mask)
    batch = dict(queries=queries, mask=mask, old_logprobs=old_logprobs, values=values, advantages=advantages, returns=returns)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=batch)


def ppo_loss(model, b, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1):
    logits, vpreds = model(b["queries"])
    logprobs = logprobs_from_logits(logits, b["queries"].roll(-1, 1))
    mask, values, returns = b["mask"], b["values"], b["returns"]
    advantages = masked_whiten(b["advantages"], mask)
    vpredclipped = clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    vf_losses1 = torch.square(vpreds.float() - returns.float())
    vf_losses2 = torch.square(vpredclipped.float() - returns.float())
    vf_loss = 0.5 * torch.max(vf_losses1, vf_losses2).mean()
    ratio = torch.exp(logprobs - b["old_logprobs"])
    pg_losses = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    pg_loss = masked_mean(torch.max(pg_losses, pg_losses2), mask)
    return pg_loss + vf_coef * vf_loss


def run(s=None):
    s = s or build()
    loss = ppo_loss(s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

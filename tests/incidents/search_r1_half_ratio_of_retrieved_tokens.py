"""PPO of a search agent in fp16: retrieved passages stand in the response and are masked out of the loss by info_mask.

The passages were not sampled by the policy; the log-probs that the quantised rollout engine and the half-precision trainer give to such odd tokens differ by
more than 11.09 in places, and exp of that is beyond 65504. The row has a negative advantage, so max keeps the inf, and the masked mean
multiplies it by 0: NaN. Sampled tokens all have ratios near 1.

Source: https://github.com/PeterGriffinJin/Search-R1/blob/main/verl/trainer/ppo/core_algos.py (compute_policy_loss with state masking, masked_mean).
Heals: the mask on the log ratio before exp, a bound on it, float32 log-probs and ratios.  Does not: clipping the ratio afterwards, loss scaling, a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "fp16_overflow"),
    op=("exp",),
    index=(2, 4),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "upcast_fp32", "where_on_detached"),
    variable=("ratio",),
    line=("ratio = torch.exp(negative_approx_kl)",),
)


class Actor(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc1 = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.fc1(self.embed(ids))))


def logprobs_from_logits(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def compute_policy_loss(old_log_prob, log_prob, advantages, eos_mask, cliprange):
    negative_approx_kl = log_prob - old_log_prob
    ratio = torch.exp(negative_approx_kl)
    pg_losses = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    return masked_mean(torch.max(pg_losses, pg_losses2), eos_mask)


def build():
    torch.manual_seed(65)
    model = Actor().half()
    responses = torch.randint(0, 32, (3, 9))
    info_mask = torch.ones(3, 8, dtype=torch.half)
    info_mask[0, 2:5] = 0
    info_mask[2, 3:7] = 0
    with torch.no_grad():
        log_prob = logprobs_from_logits(model(responses)[:, :-1], responses[:, 1:])
    old_log_prob = log_prob + 0.02 * torch.randn_like(log_prob)
    old_log_prob[0, 2:5] -= torch.tensor([1.5, 6.0, 3.0], dtype=torch.half)
    old_log_prob[2, 3:7] -= torch.tensor([9.0, 12.5, 4.0, 11.5], dtype=torch.half)
    advantages = torch.tensor([[0.75], [0.5], [-1.25]], dtype=torch.half).expand(3, 8)
    batch = dict(responses=responses, info_mask=info_mask, old_log_prob=old_log_prob, advantages=advantages)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    log_prob = logprobs_from_logits(s.model(b["responses"])[:, :-1], b["responses"][:, 1:])
    loss = compute_policy_loss(b["old_log_prob"], log_prob, b["advantages"], b["info_mask"], cliprange=0.2)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

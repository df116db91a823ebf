"""RLOO with two reward functions; one completion could be scored by neither (both returned None, stored as NaN).

The weighted rewards are summed over the functions, the leave-one-out baseline is made of the sum of the group: one unscorable completion turns the
advantages of its whole group to NaN, then the loss and every weight. The other group is innocent.

Source: https://github.com/huggingface/trl/pull/5902 (exclude completions whose rewards are all None from the GRPO/RLOO baseline).
Heals: leaving the completion (or its group) out, a score in its place at the source.  Does not: an epsilon, a mean instead of a sum, clipping the ratio.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("mul", "input"),
    index=(5, 0),
    masked=False,
    role=("rewards",),
    fix=("drop_invalid_sample", "reject_input", "fix_upstream", "mask_before_op"),
    variable=("rewards_per_func",),
    line=(
        "weighted_rewards = rewards_per_func * reward_weights",
        'rewards_per_func = torch.tensor([[float("nan") if r is None else r for r in pair] for pair in zip(accuracy, style)])',
    ),
)

NUM_GENERATIONS = 4


class Policy(nn.Module):
    def __init__(self, vocab=28, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.ff = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.out(torch.relu(self.ff(self.emb(ids))))


def per_token_logps(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(5902)
    model = Policy()
    ids = torch.randint(0, 28, (8, 7))
    completion_mask = torch.ones(8, 6)
    for row, length in enumerate((6, 5, 6, 3, 6, 6, 4, 6)):
        completion_mask[row, length:] = 0
    accuracy = [1.0, 0.0, 0.0, 1.0, 0.0, None, 1.0, 1.0]
    style = [0.2, 0.1, 0.4, 0.3, 0.1, None, 0.2, 0.5]
    rewards_per_func = torch.tensor([[float("nan") if r is None else r for r in pair] for pair in zip(accuracy, style)])
    with torch.no_grad():
        old = per_token_logps(model, ids)
    batch = dict(ids=ids, completion_mask=completion_mask, rewards_per_func=rewards_per_func, old_per_token_logps=old)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def rloo_advantages(rewards_per_func, reward_weights):
    weighted_rewards = rewards_per_func * reward_weights
    grouped_rewards = weighted_rewards.sum(dim=1).view(-1, NUM_GENERATIONS)
    grouped_sum = grouped_rewards.sum(dim=1, keepdim=True)
    baselines = (grouped_sum - grouped_rewards) / (NUM_GENERATIONS - 1)
    return (grouped_rewards - baselines).view(-1)


def run(s=None):
    s = s or build()
    b = s.batch
    advantages = rloo_advantages(b["rewards_per_func"], torch.tensor([[1.0, 0.5]]))
    logps = (per_token_logps(s.model, b["ids"]) * b["completion_mask"]).sum(1)
    old_logps = (b["old_per_token_logps"] * b["completion_mask"]).sum(1)
    log_ratio = logps - old_logps
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 0.8, 1.2)
    loss = -torch.min(coef_1 * advantages, coef_2 * advantages).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

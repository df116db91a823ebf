"""DeepAnalyze, GRPO with num_generations=1: the standard deviation of one reward.

Rollout and rewards are fine, but grouped_rewards has one column and the unbiased std of one number is NaN; the 1e-4 beside it does not help. policy_loss is NaN in
every batch. (Source: ruc-datalab/DeepAnalyze, issue 116, GRPO trainer of its ms-swift fork, _compute_advantages with scale_rewards.)
Heals: zeros for the std where the group has one answer; not scaling (refusing num_generations < 2 with scale_rewards). Does not: a larger epsilon; nan_to_num on the
loss (gradient NaN).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(0,),
    masked=False,
    role=("advantages", "rewards"),
    fix=("guard_small_group", "validate_config"),
    variable=("std_grouped_rewards",),
    line=("std_grouped_rewards = grouped_rewards.std(dim=1)",),
)

ARGS = SimpleNamespace(num_generations=1, scale_rewards=True, epsilon=0.2, beta=0.04)


class Policy(nn.Module):
    def __init__(self, vocab=22, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed_tokens(input_ids))[0])


def get_per_token_logps(model, input_ids, logits_to_keep):
    logits = model(input_ids)[:, -(logits_to_keep + 1) : -1]
    return logits.log_softmax(-1).gather(-1, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)


def compute_advantages(rewards_per_func, args):
    rewards = rewards_per_func.nansum(dim=1)
    grouped_rewards = rewards.view(-1, args.num_generations)
    mean_grouped_rewards = grouped_rewards.mean(dim=1)
    std_grouped_rewards = grouped_rewards.std(dim=1)
    mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(args.num_generations, dim=0)
    std_grouped_rewards = std_grouped_rewards.repeat_interleave(args.num_generations, dim=0)
    advantages = rewards - mean_grouped_rewards
    if args.scale_rewards:
        advantages = advantages / (std_grouped_rewards + 1e-4)
    return advantages


def build():
    torch.manual_seed(17)
    model = Policy()
    input_ids = torch.randint(0, 22, (4, 11))
    completion_mask = torch.ones(4, 7)
    completion_mask[2, 5:] = 0
    logps = get_per_token_logps(model, input_ids, 7).detach()
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        input_ids=input_ids,
        completion_mask=completion_mask,
        ref_per_token_logps=logps + 0.1 * torch.randn_like(logps),
        rewards_per_func=torch.tensor([[1.0, 0.2], [0.0, 0.1], [1.0, float("nan")], [0.0, 0.3]]),
    )


def run(s=None):
    s = s or build()
    advantages = compute_advantages(s.rewards_per_func, ARGS)
    mask = s.completion_mask
    per_token_logps = get_per_token_logps(s.model, s.input_ids, mask.shape[1])
    ref_diff = s.ref_per_token_logps - per_token_logps
    per_token_kl = torch.exp(ref_diff) - ref_diff - 1
    coef_1 = torch.exp(per_token_logps - per_token_logps.detach())
    coef_2 = torch.clamp(coef_1, 1 - ARGS.epsilon, 1 + ARGS.epsilon)
    per_token_loss1 = coef_1 * advantages.unsqueeze(1)
    per_token_loss2 = coef_2 * advantages.unsqueeze(1)
    per_token_loss = -torch.min(per_token_loss1, per_token_loss2) + ARGS.beta * per_token_kl
    loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

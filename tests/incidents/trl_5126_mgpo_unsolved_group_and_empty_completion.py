"""TRL #5126 (MGPO) - two faults in one step: a group that nobody solved, and a completion of no tokens.

First: MGPO weights each group by exp(-lambda * KL(p || 1/2)) of its success rate p. With p = 0 the term p * log(p / 0.5) is 0 * -inf = NaN,
so the advantages of that group are NaN. It happens while the advantages are made, under no_grad.
Second, on its own and in another group: one completion is empty (the end token was dropped), and the per-sequence mean of the "grpo" loss
divides 0 by 0. The first harmful value is the logarithm of the success rate; repairing only one of the two leaves a NaN loss.
Source: https://github.com/huggingface/trl/pull/5126 (`_compute_mgpo_weights`); loss_type="grpo" of TRL before its clamp(min=1.0).
Heals (the first): torch.xlogy, or clamping the rate away from 0 and 1. Does not: a floor on the weight after exp.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "log_zero"),
    op=("log", "mul"),
    index=(1,),
    masked=False,
    role=("advantages", "kl", "is_weight", "rewards"),
    fix=("stable_function", "clamp_input"),
    variable=(None,),
    line=("solved_term = pc * torch.log(pc / target_rate)",),
)


def compute_mgpo_weights(rewards, num_generations, reward_base=1.0, mgpo_lambda=2.0, target_rate=0.5):
    """Maximum-entropy guided weights: groups of about half correct answers count most."""
    grouped_rewards = rewards.detach().view(-1, num_generations)
    pc = (grouped_rewards >= reward_base).float().mean(dim=1)
    solved_term = pc * torch.log(pc / target_rate)
    unsolved_term = (1 - pc) * torch.log((1 - pc) / (1 - target_rate))
    weights = torch.exp(-mgpo_lambda * (solved_term + unsolved_term))
    return weights.repeat_interleave(num_generations, dim=0)


def compute_advantages(rewards, num_generations):
    mean_grouped_rewards = rewards.view(-1, num_generations).mean(dim=1).repeat_interleave(num_generations)
    std_rewards = rewards.view(-1, num_generations).std(dim=1).repeat_interleave(num_generations)
    advantages = (rewards - mean_grouped_rewards) / (std_rewards + 1e-4)
    return advantages * compute_mgpo_weights(rewards, num_generations)


class Policy(nn.Module):
    def __init__(self, vocab=18, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def build():
    torch.manual_seed(2126)
    policy = Policy()
    completion_ids = torch.randint(0, 18, (12, 7))
    lengths = torch.tensor([6, 4, 6, 5, 6, 6, 3, 6, 5, 6, 0, 4])
    completion_mask = (torch.arange(6) < lengths[:, None]).int()
    rewards = torch.tensor([1.0, 0.1, 1.0, 0.0, 0.1, 0.0, 0.1, 0.1, 1.0, 1.0, 0.0, 0.1])  # three prompts of four
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    return SimpleNamespace(
        model=policy,
        optimizer=optimizer,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        rewards=rewards,
        num_generations=4,
        epsilon=0.2,
    )


def per_token_logps(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def run(s=None):
    s = s or build()
    with torch.no_grad():
        advantages = compute_advantages(s.rewards, s.num_generations)
        old_logps = per_token_logps(s.model, s.completion_ids)
    logps = per_token_logps(s.model, s.completion_ids)
    coef_1 = torch.exp(logps - old_logps)
    coef_2 = torch.clamp(coef_1, 1 - s.epsilon, 1 + s.epsilon)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    sequence_loss = (per_token_loss * s.completion_mask).sum(-1) / s.completion_mask.sum(-1)
    loss = sequence_loss.mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

"""RLOO sums the log-probs of a long completion before taking the ratio, and a modest per-token drift adds up to more than exp can hold."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(3,),
    masked=False,
    role=("ratio",),
    fix=("clamp_exponent",),
    variable=("coef_1",),
    line=("coef_1 = torch.exp(logprobs - old_logprobs)",),
)


def selective_log_softmax(logits, index):
    selected = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def rloo_advantages(rewards, num_generations):
    grouped = rewards.view(-1, num_generations)
    baselines = (grouped.sum(1, keepdim=True) - grouped) / (num_generations - 1)
    return (grouped - baselines).view(-1)


def _compute_loss(per_token_logps, inputs, epsilon_low=0.2, epsilon_high=0.2):
    completion_mask = inputs["completion_mask"]
    logprobs = (per_token_logps * completion_mask).sum(1)
    old_logprobs = (inputs["old_per_token_logps"] * completion_mask).sum(1)
    coef_1 = torch.exp(logprobs - old_logprobs)
    coef_2 = torch.clamp(coef_1, 1 - epsilon_low, 1 + epsilon_high)
    advantages = inputs["advantages"]
    per_sequence_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    return per_sequence_loss.mean()


def build():
    torch.manual_seed(107)
    model = nn.Sequential(nn.Embedding(26, 10), nn.Linear(10, 26))
    ids = torch.randint(0, 26, (4, 49))
    completion_mask = torch.ones(4, 48)
    completion_mask[0, 30:] = 0
    completion_mask[2, 41:] = 0
    with torch.no_grad():
        old = selective_log_softmax(model(ids[:, :-1]), ids[:, 1:])
    old[3] -= 2.1 + 0.2 * torch.rand(48)
    inputs = {
        "completion_mask": completion_mask,
        "old_per_token_logps": old,
        "advantages": rloo_advantages(torch.tensor([1.0, 0.2, 0.9, 0.0]), num_generations=4),
    }
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), batch=SimpleNamespace(ids=ids, inputs=inputs)
    )


def run(s=None):
    s = s or build()
    per_token_logps = selective_log_softmax(s.model(s.batch.ids[:, :-1]), s.batch.ids[:, 1:])
    loss = _compute_loss(per_token_logps, s.batch.inputs)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

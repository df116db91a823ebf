"""TRL - MaxRL advantages: the centred reward of a group is divided by the group's mean reward. The estimator is made for rewards of 0
and 1; a verifier that answers +1 and -1 gives a half-solved group the mean 0, so its advantages are 1/0 = +-inf and the loss is NaN.

https://github.com/huggingface/trl/pull/5026 (review: the mean may be negative, nothing enforces binary rewards)
Heals: a floor under the denominator, no scaling for groups without a positive mean, rewards mapped to {0, 1}. Does not: nan_to_num of
the advantages (3e38 overflows in the next sum), gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(4,),
    masked=False,
    role=("advantages", "rewards"),
    fix=(
        "clamp_denominator",
        "representable_eps",
        "guard_small_group",
        "guard_empty",
        "drop_invalid_sample",
        "validate_config",
        "clamp_input",
    ),
    variable=("advantages",),
    line=("advantages = advantages / mean_grouped_rewards",),
)


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def per_token_logps(model, ids):
    logits = model(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def compute_advantages(rewards, num_generations, scale_rewards="mean"):
    mean_grouped_rewards = rewards.view(-1, num_generations).mean(dim=1)
    mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)
    advantages = rewards - mean_grouped_rewards
    if scale_rewards == "mean":
        advantages = advantages / mean_grouped_rewards
    return advantages


def compute_loss(model, inputs, epsilon=0.2):
    logps = per_token_logps(model, inputs["input_ids"])
    advantages = inputs["advantages"].unsqueeze(1)
    coef = torch.exp(logps - inputs["old_per_token_logps"]).clamp(max=1 + epsilon)
    per_token_loss = -coef * advantages
    return (per_token_loss * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()


def build():
    torch.manual_seed(5026)
    model = Policy()
    input_ids = torch.randint(0, 24, (8, 7))
    completion_mask = torch.ones(8, 6)
    completion_mask[1, 4:] = 0
    completion_mask[6, 3:] = 0
    # verifier: +1 solved, -1 not solved; the second prompt is solved by two of four
    rewards = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    with torch.no_grad():
        old_per_token_logps = per_token_logps(model, input_ids)
    inputs = dict(input_ids=input_ids, completion_mask=completion_mask, old_per_token_logps=old_per_token_logps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, inputs=inputs, rewards=rewards, num_generations=4)


def run(s=None):
    s = s or build()
    s.inputs["advantages"] = compute_advantages(s.rewards, s.num_generations)
    loss = compute_loss(s.model, s.inputs)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

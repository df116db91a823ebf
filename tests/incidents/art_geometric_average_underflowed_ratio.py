"""OpenPipe ART, loss_fn with importance_sampling_level="geometric_average" (https://github.com/OpenPipe/ART/blob/main/src/art/loss.py).

The token ratio and the sequence ratio are averaged geometrically: prob_ratio**0.5 * sequence_prob_ratio**0.5. One token of a stale trajectory
has become impossible for the new policy (its logit fell by 250), so its ratio underflows to exactly 0. The loss is finite; the gradient of
x**0.5 at 0 is inf, and inf times the exp's own 0 is NaN. Averaging the logs (exp of 0.5 * difference) or bounding the difference from below
heals it. Zeroing the average with torch.where where it is out of range (ART's mask_prob_ratio) does not: backward still makes 0 * inf.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("pow",),
    index=(0, 6),
    masked=False,
    role=("ratio", "is_weight"),
    fix=(
        "stable_function",
        "clamp_exponent",
        "clamp_input",
        "representable_eps",
        "avoid_singular_op",
        "drop_invalid_sample",
        "mask_before_op",
    ),
    variable=(None, "prob_ratio"),
    line=("prob_ratio = (prob_ratio**0.5) * (sequence_prob_ratio**0.5)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=20, hidden=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, tokens):
        return self.lm_head(torch.tanh(self.proj(self.embed(tokens))))


def shift_tensor(tensor, pad):
    return F.pad(tensor[:, 1:], (0, 1), value=pad)


def group_mean(values, by):
    count = int(by.max()) + 1
    total = torch.zeros(count).scatter_add(0, by.flatten(), values.flatten())
    size = torch.zeros(count).scatter_add(0, by.flatten(), torch.ones(values.numel()))
    return (total / size.clamp(min=1.0))[by]


def new_logprobs_of(model, tokens):
    return model(tokens).log_softmax(-1).gather(-1, shift_tensor(tokens, 0)[..., None]).squeeze(-1)


def loss_fn(inputs, new_logprobs, epsilon=0.2):
    old_logprobs = shift_tensor(inputs["logprobs"], 0.0)
    advantages = shift_tensor(inputs["advantages"], 0.0)
    assistant_mask = shift_tensor(inputs["assistant_mask"], False)
    group_ids = shift_tensor(inputs["group_ids"], 0) * assistant_mask
    logprob_diff = torch.where(assistant_mask, new_logprobs - old_logprobs, 0.0)
    prob_ratio = torch.exp(logprob_diff)
    sequence_prob_ratio = torch.exp(group_mean(logprob_diff, group_ids))
    prob_ratio = (prob_ratio**0.5) * (sequence_prob_ratio**0.5)
    policy_loss = -torch.min(prob_ratio * advantages, prob_ratio.clip(1 - epsilon, 1 + epsilon) * advantages)
    return (policy_loss * assistant_mask).sum() / (assistant_mask.sum() + 1e-6)


def build():
    torch.manual_seed(502)
    model = Policy()
    tokens = torch.randint(0, 15, (1, 16))
    tokens[0, 7] = 18
    group_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 2, 0]])
    assistant_mask = group_ids > 0
    with torch.no_grad():
        sampled = new_logprobs_of(model, tokens)
        model.lm_head.bias[18] -= 250.0
    logprobs = F.pad(sampled[:, :-1], (1, 0))
    advantages = torch.where(group_ids == 1, 0.8, -0.8) * assistant_mask
    inputs = dict(tokens=tokens, group_ids=group_ids, assistant_mask=assistant_mask, logprobs=logprobs, advantages=advantages)
    return SimpleNamespace(model=model, inputs=inputs, optimizer=torch.optim.AdamW(model.parameters(), lr=5e-6))


def run(s=None):
    s = s or build()
    loss = loss_fn(s.inputs, new_logprobs_of(s.model, s.inputs["tokens"]))
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()

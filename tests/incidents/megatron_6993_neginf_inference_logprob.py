"""Megatron-LM #6993 (https://github.com/NVIDIA/Megatron-LM/pull/6993, "Avoid emitting NaN / Inf logprobs out of inference"): the inference
engine sent -inf as the log-prob of a token that it had sampled itself. The loss is that of megatron/rl/rl_utils.py (calculate_grpo_loss): the
correction weight exp(old - inference) of that counted token is infinite.

Heals: reject or replace the -inf where it comes in (weight 1 for that token), or drop the token. Does not heal: nan_to_num on the weight, it
becomes 3.4e38 and the loss overflows again.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any", "sub", "exp"),
    index=(1, 4),
    masked=False,
    role=("rollout_log_probs",),
    fix=("drop_invalid_sample", "reject_input", "mask_before_op", "fix_upstream", "clamp_exponent", "clamp_input"),
    variable=("inference_logprobs",),
    line=("is_weights = (old_logprobs - inference_logprobs).exp()",),
)


def calculate_grpo_advantages(rewards):
    mean = rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, unbiased=False)
    return ((rewards - mean) / (1e-4 + std)).flatten()


def calculate_grpo_loss(
    current_logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    clamp_eps_lower,
    clamp_eps_upper,
    kl_beta,
    entropy_weight,
    inference_logprobs=None,
    is_truncation_coef=None,
):
    ratios = (current_logprobs - old_logprobs).exp()
    clamped_ratios = ratios.clamp(1 - clamp_eps_lower, 1 + clamp_eps_upper)
    advantages = advantages.view(-1, 1)

    ref_diff = ref_logprobs - current_logprobs
    kl_term = ref_diff.exp() - ref_diff - 1
    entropy_term = -current_logprobs.exp() * current_logprobs

    is_weights = torch.tensor(1.0, dtype=old_logprobs.dtype)
    if inference_logprobs is not None:
        is_weights = (old_logprobs - inference_logprobs).exp()
        if is_truncation_coef is not None:
            is_weights = torch.min(is_weights, torch.tensor(is_truncation_coef, dtype=old_logprobs.dtype))

    return -is_weights * torch.min(ratios * advantages, clamped_ratios * advantages) + kl_beta * kl_term - entropy_weight * entropy_term


class GPT(nn.Module):
    def __init__(self, vocab=20, hidden=12):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.linear_fc1 = nn.Linear(hidden, 2 * hidden)
        self.linear_fc2 = nn.Linear(2 * hidden, hidden)
        self.output_layer = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.output_layer(x + self.linear_fc2(torch.nn.functional.gelu(self.linear_fc1(x))))


def get_logprobs(model, tokens):
    return model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(6993)
    model = GPT()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 20, (4, 8))
    with torch.no_grad():
        old = get_logprobs(model, tokens)
    inference = old + 0.02 * torch.randn_like(old)
    inference[1, 4] = float("-inf")
    loss_mask = torch.ones(4, 7)
    loss_mask[:, :2] = 0  # the prompt
    advantages = calculate_grpo_advantages(torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    batch = {
        "tokens": tokens,
        "old_logprobs": old,
        "ref_logprobs": old.clone(),
        "inference_logprobs": inference,
        "loss_mask": loss_mask,
        "advantages": advantages,
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    current_logprobs = get_logprobs(s.model, b["tokens"])
    loss = calculate_grpo_loss(
        current_logprobs,
        b["old_logprobs"],
        b["ref_logprobs"],
        b["advantages"],
        0.2,
        0.28,
        0.01,
        1e-3,
        inference_logprobs=b["inference_logprobs"],
    )
    loss = (loss * b["loss_mask"]).sum() / b["loss_mask"].sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())

"""`calculate_grpo_loss` of Megatron-LM's RL loop: the minimum rejects an overflowed ratio, its gradient does not forget it.

A token of a good rollout (positive advantage) got exp(-97) from the behaviour policy and exp(-1) from the current one. The ratio is
inf, min(ratio * A, clamped * A) takes the clamped one, the loss is finite. Backward sends 0 into the rejected branch and exp makes
0 * inf = NaN of it.

Source: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/rl/rl_utils.py (calculate_grpo_loss).
Heals: a bound on the exponent, or a harmless log ratio for rejected tokens before exp. Does not: clamping the ratio after exp (it is done),
torch.where on the finished loss, gradient clipping (the norm is NaN).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap",),
    op=("exp",),
    index=(0, 5),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "mask_before_op", "where_on_detached", "clamp_input"),
    variable=("ratios",),
    line=("ratios = (current_logprobs - old_logprobs).exp()",),
)


def calculate_grpo_loss(
    current_logprobs, old_logprobs, ref_logprobs, advantages, clamp_eps_lower, clamp_eps_upper, kl_beta, entropy_weight
):
    ratios = (current_logprobs - old_logprobs).exp()
    clamped_ratios = ratios.clamp(1 - clamp_eps_lower, 1 + clamp_eps_upper)
    advantages = advantages.unsqueeze(1)
    ref_diff = ref_logprobs - current_logprobs
    kl_term = ref_diff.exp() - ref_diff - 1
    entropy_term = -current_logprobs.exp() * current_logprobs
    loss = -torch.min(ratios * advantages, clamped_ratios * advantages) + kl_beta * kl_term - entropy_weight * entropy_term
    return loss, kl_term.detach(), ratios.detach()


def selective_log_softmax(logits, index):
    return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(11)
    model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    tokens = torch.randint(0, 20, (2, 9))
    with torch.no_grad():
        logprobs = selective_log_softmax(model(tokens[:, :-1]), tokens[:, 1:])
    old = logprobs + 0.03 * torch.randn_like(logprobs)
    old[0, 5] = -97.0
    batch = {
        "tokens": tokens,
        "old_logprobs": old,
        "ref_logprobs": logprobs,
        "advantages": torch.tensor([1.2, -0.9]),
        "loss_mask": torch.tensor([[1.0] * 8, [1.0] * 5 + [0.0] * 3]),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(2):
        current_logprobs = selective_log_softmax(s.model(b["tokens"][:, :-1]), b["tokens"][:, 1:])
        losses, _, _ = calculate_grpo_loss(current_logprobs, b["old_logprobs"], b["ref_logprobs"], b["advantages"], 0.2, 0.28, 0.01, 0.001)
        loss = (losses * b["loss_mask"]).sum() / b["loss_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

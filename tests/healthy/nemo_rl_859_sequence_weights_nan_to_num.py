"""Sequence-level importance correction of NeMo RL: weights of inf and 0 that nan_to_num takes out, without a graph.

exp of the summed difference between the trainer's and the generator's log-probs is inf for one sequence. The weights are constants of the
loss, torch.nan_to_num(nan=0, posinf=0, neginf=0) follows at once, and the sequence weighs nothing. Loss, gradients and weights are finite
and equal to those of a batch without the sequence (with the same normaliser): healthy.

Source: https://github.com/NVIDIA-NeMo/RL/pull/859 (sequence_level_importance_sampling), nemo_rl/algorithms/loss_functions.py.
"""

from types import SimpleNamespace

import torch
from torch import nn


def masked_mean(values, mask, global_normalization_factor):
    return (values * mask).sum() / (global_normalization_factor + 1e-8)


def clipped_pg_loss(curr_logprobs, batch, ratio_clip=0.2):
    mask = batch["token_mask"]
    ratios = (curr_logprobs - batch["prev_logprobs"]).exp()
    ratios_clamped = ratios.clamp(1 - ratio_clip, 1 + ratio_clip)
    loss1 = -batch["advantages"] * ratios
    loss2 = -batch["advantages"] * ratios_clamped
    clip_loss = torch.max(loss1, loss2)
    seq_lp_diff = ((batch["prev_logprobs"] - batch["generation_logprobs"]) * mask).sum(dim=-1)
    actor_importance_weights = torch.exp(seq_lp_diff).detach()
    actor_importance_weights = torch.nan_to_num(actor_importance_weights, nan=0.0, posinf=0.0, neginf=0.0)
    actor_importance_weights_expanded = actor_importance_weights.unsqueeze(-1)
    return masked_mean(actor_importance_weights_expanded * clip_loss, mask, mask.sum())


def build():
    torch.manual_seed(9)
    model = nn.Sequential(nn.Embedding(13, 9), nn.Linear(9, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 13, (3, 9))
    with torch.no_grad():
        prev = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    generation = prev + 0.02 * torch.randn_like(prev)
    generation[1] -= 14.0  # the generator ran with other weights: 8 tokens, exp(112)
    batch = {
        "tokens": tokens,
        "prev_logprobs": prev,
        "generation_logprobs": generation,
        "advantages": torch.tensor([[0.5], [1.0], [-1.5]]),
        "token_mask": torch.ones(3, 8),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    tokens = s.batch["tokens"]
    for _ in range(3):
        logits = s.model(tokens[:, :-1])
        curr = logits.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
        loss = clipped_pg_loss(curr, s.batch)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

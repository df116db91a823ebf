"""Top-k filtered logits give -inf log-probs to tokens outside the trainer's top-k; they are replaced and kept out of the actor's mean.

The trainer applies the sampler's top-k to its own logits, so a sampled token can be outside by a hair and gets -inf. The keep mask is taken
from isinf, the values are replaced by 0 before anything is computed of them, and both the sum and the count use the narrowed mask. The
gradient of the -inf entries is exactly 0. Many -inf, all on purpose, none in the loss: healthy.

Source: https://github.com/NVIDIA-NeMo/RL/pull/3551 (mask_out_neg_inf_logprobs returns the keep mask).
"""

from types import SimpleNamespace

import torch
from torch import nn


def apply_top_k(logits, top_k):
    threshold = logits.topk(top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, float("-inf"))


def mask_out_neg_inf_logprobs(logprobs, mask, name):
    keep = ~torch.isneginf(logprobs)
    dropped = int(((~keep) & mask.bool()).sum())
    if dropped:
        print(f"{name}: {dropped} sampled tokens outside of the top-k, left out of the actor loss")
    return torch.where(keep, logprobs, torch.zeros_like(logprobs)), keep


def build():
    torch.manual_seed(12)
    model = nn.Sequential(nn.Embedding(16, 10), nn.Tanh(), nn.Linear(10, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tokens = torch.randint(0, 16, (3, 8))
    mask = torch.ones(3, 7)
    mask[1, 5:] = 0
    prev = torch.full((3, 7), -1.6) + 0.1 * torch.randn(3, 7)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        batch={"tokens": tokens, "mask": mask, "prev": prev, "advantages": torch.tensor([[1.0], [-0.2], [-0.8]])},
    )


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(3):
        logits = apply_top_k(s.model(b["tokens"][:, :-1]), top_k=6)
        curr = logits.log_softmax(-1).gather(-1, b["tokens"][:, 1:].unsqueeze(-1)).squeeze(-1)
        curr, keep = mask_out_neg_inf_logprobs(curr, b["mask"], "curr_logprobs")
        actor_mask = b["mask"] * keep
        log_ratio = torch.where(keep, curr - b["prev"], torch.zeros_like(curr))
        ratios = log_ratio.exp()
        loss = torch.max(-b["advantages"] * ratios, -b["advantages"] * ratios.clamp(0.8, 1.2))
        loss = (loss * actor_mask).sum() / actor_mask.sum().clamp(min=1)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

"""torchtune GRPO: trajectories of several groups are padded to one length; a reviewer proposes -1e9 as the padding of log-probs.

The log-probs of the current policy are computed on the padded tokens as well and are ordinary numbers there. pi - pi_old = +1e9 on padding, exp makes
it inf, the row's advantage is negative, so min() keeps -inf, and masked_mean multiplies it by 0.

Source: https://github.com/meta-pytorch/torchtune/pull/2425 (review of _pad_tensor), torchtune GRPOLoss (ratios, masked_mean)
Heals: zeroing the log ratio on padding, clamping it, or padding with the harmless value that the recipe uses. Does not: torch.where on the policy
loss instead of the product with the mask.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask",),
    op=("exp",),
    index=(3, 6),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "fix_upstream", "clamp_input"),
    variable=("ratios",),
    line=("ratios = torch.exp(pi_logprobs - pi_old_logprobs)",),
)


def masked_mean(x, mask, dim=None):
    if dim is None:
        return (x * mask).sum() / (mask.sum() + 1e-8)
    return (x * mask).sum(dim=dim) / (mask.sum(dim=dim) + 1e-8)


def pad_to(tensor, length, value):
    return F.pad(tensor, (0, length - tensor.shape[-1]), value=value)


class GRPOLoss(nn.Module):
    def __init__(self, epsilon=0.2):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, pi_old_logprobs, pi_logprobs, advantages, padding_masks):
        ratios = torch.exp(pi_logprobs - pi_old_logprobs)
        clipped_ratios = torch.clamp(ratios, 1.0 - self.epsilon, 1.0 + self.epsilon)
        unclipped = advantages[:, None] * ratios
        clipped = advantages[:, None] * clipped_ratios
        policy_loss = torch.min(unclipped, clipped)
        return -masked_mean(policy_loss, padding_masks)


def build():
    torch.manual_seed(23)
    model = nn.Sequential(nn.Embedding(22, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 22))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = GRPOLoss()
    # two groups of two: the responses of the first have 9 tokens, the longest of the second has 6 and is padded
    long_group, short_group = torch.randint(1, 22, (3, 10)), torch.randint(1, 22, (1, 7))
    ids = torch.cat([long_group, pad_to(short_group, 10, 0)])

    def logprobs(x):
        with torch.no_grad():
            return F.log_softmax(model(x[:, :-1]), -1).gather(-1, x[:, 1:, None]).squeeze(-1)

    old = torch.cat([logprobs(long_group) + 0.1 * torch.randn(3, 9), pad_to(logprobs(short_group), 9, -1e9)])
    padding_masks = torch.ones(4, 9)
    padding_masks[3, 6:] = 0.0
    advantages = torch.tensor([0.9, -0.4, 0.5, -1.0])
    return SimpleNamespace(
        model=model, optimizer=optimizer, loss_fn=loss_fn, ids=ids, pi_old_logprobs=old, advantages=advantages, padding_masks=padding_masks
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[:, :-1])
    pi_logprobs = F.log_softmax(logits, -1).gather(-1, s.ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    loss = s.loss_fn(s.pi_old_logprobs, pi_logprobs, s.advantages, s.padding_masks)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

"""slime / miles whiten advantages over all ranks with a one-pass variance, mean of squares minus square of the mean, in float32.

Every rollout of this step earned the same reward (all solved, no KL term), so all returns are one constant; the difference of the two large
numbers comes out a little below zero, far more than epsilon = 1e-8 can lift, rsqrt of it is NaN and every advantage with it.

Source: https://github.com/radixark/miles/pull/3229 and slime/utils/distributed_utils.py (distributed_masked_whiten),
https://github.com/THUDM/slime
Heals: a floor of 0 under the variance, or the variance from centred values (two passes). Does not: a larger epsilon of the usual size (1e-6), nor
whitening without shifting the mean.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("rsqrt",),
    index=(),
    masked=None,
    role=("advantages", "rewards"),
    fix=("stable_function", "clamp_input", "clamp_denominator", "avoid_singular_op"),
    variable=(None,),
    line=("whitened = (values - global_mean) * torch.rsqrt(global_var + epsilon)",),
)


def all_reduce_sum(stats_of_ranks):
    return torch.stack(stats_of_ranks).sum(0)


def local_statistics(values, mask):
    return torch.stack([(values * mask).sum(), (values**2 * mask).sum(), mask.sum()])


def distributed_masked_whiten(values, mask, stats_of_ranks, epsilon=1e-8):
    global_sum, global_sum_sq, global_mask_sum = all_reduce_sum(stats_of_ranks)
    if global_mask_sum.item() == 0:
        raise ValueError("the global mask sum is zero")
    global_mean = global_sum / global_mask_sum
    global_var = global_sum_sq / global_mask_sum - global_mean**2
    if global_mask_sum.item() >= 2:
        global_var = global_var * global_mask_sum / (global_mask_sum - 1)
    whitened = (values - global_mean) * torch.rsqrt(global_var + epsilon)
    return whitened


def reinforce_returns(rewards, mask, gamma=1.0):
    returns = torch.zeros_like(mask)
    running = torch.zeros(mask.shape[0])
    for t in reversed(range(mask.shape[1])):
        last = mask[:, t] * (1 - (mask[:, t + 1] if t + 1 < mask.shape[1] else torch.zeros(mask.shape[0])))
        running = last * rewards + gamma * running * mask[:, t]
        returns[:, t] = running
    return returns


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 20, (4, 12))
    loss_masks = torch.ones(4, 11)
    loss_masks[1, 7:] = 0.0
    loss_masks[3, 9:] = 0.0
    rewards = torch.full((4,), 30.7)  # accuracy, format and length bonus, on the judge's scale of 0 to 32
    # the two batches of this step: rank 0 (trained here) and rank 1
    other_mask = torch.ones(4, 11)
    other_mask[0, 5:] = 0.0
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        ids=ids,
        loss_masks=loss_masks,
        rewards=rewards,
        other_mask=other_mask,
        other_rewards=rewards.clone(),
    )


def run(s=None):
    s = s or build()
    returns = reinforce_returns(s.rewards, s.loss_masks)
    other = reinforce_returns(s.other_rewards, s.other_mask)
    stats = [local_statistics(returns, s.loss_masks), local_statistics(other, s.other_mask)]
    advantages = distributed_masked_whiten(returns, s.loss_masks, stats)

    log_probs = F.log_softmax(s.model(s.ids[:, :-1]), -1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    ratio = torch.exp(log_probs - log_probs.detach())
    loss = -(ratio * advantages * s.loss_masks).sum() / s.loss_masks.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

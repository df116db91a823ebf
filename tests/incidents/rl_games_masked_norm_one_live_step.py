"""rl_games, PPO with an LSTM: the advantages of a mini-batch of sequences are normalised over the live steps only. In the last mini-batch
just one step is live (the episodes had ended), and the unbiased variance divides 0 * 1 by 1 - 1.

https://github.com/Denys88/rl_games/blob/master/rl_games/algos_torch/torch_ext.py (get_mean_var_with_masks, normalization_with_masks)

Heals: leaving a single advantage unnormalised, or dividing by max(n - 1, 1). Does not: a larger epsilon beside the root, or
values_var.clamp(min=0): NaN stays NaN.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single", "zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(),
    masked=None,
    role=("advantages",),
    fix=("guard_small_group", "clamp_denominator", "clamp_input"),
    variable=("values_var",),
    line=("values_var = min_sqr * sum_mask / (sum_mask - 1)",),
)


def get_mean_var_with_masks(values, masks):
    sum_mask = masks.sum()
    values_mask = values * masks
    values_mean = values_mask.sum() / sum_mask
    min_sqr = ((values_mask**2) / sum_mask).sum() - ((values_mask / sum_mask).sum()) ** 2
    values_var = min_sqr * sum_mask / (sum_mask - 1)
    return values_mean, values_var


def normalization_with_masks(values, masks):
    values_mean, values_var = get_mean_var_with_masks(values, masks)
    return (values - values_mean) / (torch.sqrt(values_var) + 1e-8)


class LSTMActorCritic(nn.Module):
    def __init__(self, obs_dim=6, units=12, actions=4):
        super().__init__()
        self.rnn = nn.LSTM(obs_dim, units, batch_first=True)
        self.logits = nn.Linear(units, actions)
        self.value = nn.Linear(units, 1)

    def forward(self, obs):
        out, _ = self.rnn(obs)
        return self.logits(out), self.value(out).squeeze(-1)


def apply_masks(losses, masks):
    sum_mask = masks.sum()
    return [(loss * masks).sum() / sum_mask for loss in losses]


def calc_gradients(s, batch):
    masks = batch["rnn_masks"]
    advantages = normalization_with_masks(batch["returns"] - batch["old_values"], masks)
    logits, values = s.model(batch["obs"])
    neglogp = -logits.log_softmax(-1).gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(batch["old_neglogp"] - neglogp)
    a_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    c_loss = (values - batch["returns"]) ** 2
    a_loss, c_loss = apply_masks([a_loss, c_loss], masks)
    loss = a_loss + 0.5 * 2.0 * c_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


def build():
    torch.manual_seed(2203)
    model = LSTMActorCritic()
    live_steps = [[5, 5], [4, 2], [1, 0]]  # sequences per mini-batch, and how many of their 5 steps are live
    minibatches = []
    for lengths in live_steps:
        obs, actions = torch.randn(2, 5, 6), torch.randint(0, 4, (2, 5))
        with torch.no_grad():
            logits, values = model(obs)
        old_neglogp = -logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        rnn_masks = (torch.arange(5)[None] < torch.tensor(lengths)[:, None]).float()
        minibatches.append(
            dict(
                obs=obs,
                actions=actions,
                old_neglogp=old_neglogp,
                old_values=values,
                returns=values + torch.randn(2, 5),
                rnn_masks=rnn_masks,
            )
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-8)
    return SimpleNamespace(model=model, optimizer=optimizer, minibatches=minibatches)


def run(s=None):
    s = s or build()
    for batch in s.minibatches:
        loss = calc_gradients(s, batch)
    return loss


if __name__ == "__main__":
    run()

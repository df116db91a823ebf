"""multi_action_head_PPO #1 - a head that the chosen action type does not use is masked out of the joint log-prob by a multiplication.

The availability mask goes into the logits as log(mask). Where the action type needs no target, the environment offers no target: the
row of the target head is all -inf, its log_softmax is NaN, and 0 * NaN does not take it out of the joint log-prob.
Heals: a finite fill in place of log 0, a mask that offers everything to a head that is not used, a softmax that is safe for empty rows.
Does not: torch.where on the head's log-prob (the gradient of the logits stays NaN), nan_to_num.
Source: https://github.com/henrycharlesworth/multi_action_head_PPO/issues/1, core/multi_action_heads.py, core/distributions.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax", "nan_times_zero_mask", "inf_minus_inf"),
    op=("log_softmax", "_log_softmax"),
    index=(2, 0),
    masked=True,
    role=("log_probs", "logits"),
    fix=("finite_mask_fill", "mask_before_op", "safe_softmax", "skip_disabled_term", "clamp_input", "guard_empty", "fix_upstream"),
    variable=("log_probs", "head_log_probs"),
    line=("log_probs = F.log_softmax(logits, dim=-1)",),
)


class ActionHead(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.linear = nn.Linear(input_dim, output_dim)

    def forward(self, x, mask):
        logits = self.linear(x) + torch.log(mask)
        log_probs = F.log_softmax(logits, dim=-1)
        return log_probs


class MultiActionHeads(nn.Module):
    """head 0: action type (move, attack, build); head 1: direction; head 2: target."""

    def __init__(self, input_dim=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(input_dim, 16), nn.Tanh())
        self.value = nn.Linear(16, 1)
        self.heads = nn.ModuleList([ActionHead(16, 3), ActionHead(16 + 3, 4), ActionHead(16 + 3, 5)])
        self.action_type_mask = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])

    def evaluate(self, obs, masks, actions):
        h = self.body(obs)
        action_type_log_probs = self.heads[0](h, masks[0])
        joint_action_log_prob = action_type_log_probs.gather(1, actions[0][:, None])
        one_hot_action_types = F.one_hot(actions[0], 3).float()
        type_masks = self.action_type_mask[actions[0]]
        for i in range(1, len(self.heads)):
            head_log_probs = self.heads[i](torch.cat([h, one_hot_action_types], dim=-1), masks[i])
            log_prob_mask = type_masks[:, i - 1].view(-1, 1)
            joint_action_log_prob = joint_action_log_prob + log_prob_mask * head_log_probs.gather(1, actions[i][:, None])
        return joint_action_log_prob.squeeze(1), self.value(h).squeeze(1)


def build():
    torch.manual_seed(1)
    model = MultiActionHeads()
    actions = [torch.tensor([1, 2, 0, 1]), torch.tensor([0, 3, 2, 1]), torch.tensor([4, 0, 0, 2])]
    target_mask = torch.tensor(
        [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 0]]
    ).float()  # row 2 moves: nothing in reach
    masks = [torch.ones(4, 3), torch.ones(4, 4), target_mask]
    return SimpleNamespace(
        model=model,
        obs=torch.randn(4, 6),
        masks=masks,
        actions=actions,
        returns=torch.randn(4),
        old_log_probs=torch.tensor([-2.0, -3.1, -2.4, -1.9]),
        advantages=torch.tensor([0.8, -1.1, 0.3, 0.0]),
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-4),
    )


def run(s=None, clip_param=0.2):
    s = s or build()
    joint_log_prob, values = s.model.evaluate(s.obs, s.masks, s.actions)
    ratio = torch.exp(joint_log_prob - s.old_log_probs)
    action_loss = -torch.min(ratio * s.advantages, ratio.clamp(1 - clip_param, 1 + clip_param) * s.advantages).mean()
    loss = action_loss + 0.5 * F.mse_loss(values, s.returns)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss

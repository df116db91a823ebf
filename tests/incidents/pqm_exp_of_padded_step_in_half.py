"""PQM process reward model kept in float16: the Q-value of a padding step is exponentiated before torch.where throws it away.

The ranking loss of PQM (Process Reward Model with Q-value Rankings) forms exp(Q) for every slot of the (batch, steps) matrix and picks the
correct steps by torch.where(labels == 1, rewards.exp(), 0). Nothing ever trained the reward head on padding, and on the padding embedding it
answers 12.5: exp(12.5) = 268337 is inf in float16. The forward is right, the loss is finite. In backward exp hands on grad * exp(x) = 0 * inf = NaN,
and the reward head and everything below it become NaN.
Source: https://github.com/WindyLee0822/Process_Q_Model (README `PQM_loss`, train_main.py `ranking_loss`); re-implementations clamp the rewards first.
Heals: fill the rewards of the padding steps with 0 before exp; clamp the rewards before exp; rewards.float(); logsumexp form.
Does not: the 1e-5 in the denominator, filling pos_rewards_exp or the loss after the where, clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "fp16_overflow"),
    op=("exp",),
    index=(0, 4),
    masked=True,
    role=("rewards", "hidden", "loss"),
    fix=("mask_before_op", "clamp_exponent", "upcast_fp32", "clamp_input", "stable_function", "where_on_detached"),
    variable=(None,),
    line=("pos_rewards_exp = torch.where(labels == 1, rewards.exp(), 0)",),
)

PAD = 0


class ProcessValueModel(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Linear(dim, dim)
        self.v_head = nn.Linear(dim, 1, bias=False)

    def forward(self, step_ids):
        hidden = self.embed_tokens(step_ids)
        hidden = hidden + torch.tanh(self.mlp(hidden)) * 0.1
        return self.v_head(hidden).squeeze(-1)


def pqm_loss(rewards, labels, zeta=4.0):
    has_neg = (labels == 0).sum(-1).bool()
    pos_rewards_exp = torch.where(labels == 1, rewards.exp(), 0)
    neg_rewards_exp = torch.where(labels == 0, (rewards + zeta).exp(), 0).flip(dims=[-1])
    neg_reward_sum = neg_rewards_exp.sum(-1)

    ones = torch.ones(rewards.shape[0], 1)
    pos_rewards_cumsum = torch.cat([ones, pos_rewards_exp], dim=1).cumsum(-1)[:, :-1]
    pos_rewards_cumsum = torch.cat([torch.zeros_like(ones), pos_rewards_cumsum], dim=-1)
    reward_exp_cur = torch.cat([ones, torch.where(labels == 1, pos_rewards_exp, 1)], dim=-1)

    loss = -torch.log(reward_exp_cur / (reward_exp_cur + pos_rewards_cumsum + neg_reward_sum[..., None] + 1e-5))
    targets = torch.cat([has_neg[..., None].to(labels.dtype), labels], dim=-1)
    return (torch.where(targets == 1, loss, 0).sum(-1) / (targets == 1).sum(-1)).mean()


def build():
    torch.manual_seed(3)
    model = ProcessValueModel()
    with torch.no_grad():  # the head was never trained on padding: its answer there is as good as any
        w = model.v_head.weight[0]
        model.embed_tokens.weight[PAD] = 12.5 * w / w.square().sum()
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step_ids = torch.tensor([[5, 9, 3, 17, PAD, PAD], [8, 2, 11, 6, 21, 4], [7, 13, 19, PAD, PAD, PAD]])
    step_labels = torch.tensor([[1, 1, 0, 0, -100, -100], [1, 1, 1, 1, 0, 0], [1, 0, 0, -100, -100, -100]])
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"step_ids": step_ids, "step_labels": step_labels})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        rewards = s.model(s.batch["step_ids"])
        loss = pqm_loss(rewards, s.batch["step_labels"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

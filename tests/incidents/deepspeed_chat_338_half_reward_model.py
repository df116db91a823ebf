"""Reward model of RLHF step 2 in half precision: -log(sigmoid(chosen - rejected)) of a pair that is ranked the wrong way round.

The difference of the rewards is about -20 at one position. sigmoid(-20) = 2e-9 is below the smallest half, so it is 0 and its log is -inf; the loss is inf, and backward
(inf * 0 in sigmoid) makes every weight NaN after the step.
Source: https://github.com/deepspeedai/DeepSpeedExamples/issues/338 (reward model with BLOOMZ, fp16: "this is caused by log(0)"; bf16 solved it)
Heals: logsigmoid, the loss in float32, a lower bound for the difference.
Does not: + 1e-7 inside the log: the loss is finite, but 1 / 1.2e-7 overflows the half precision in backward and meets a sigmoid' of 0; clipping the gradients.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2,),
    masked=None,
    role=("log_probs", "loss"),
    fix=("stable_function", "upcast_fp32", "clamp_input", "representable_eps"),
    variable=(None,),
    line=("loss += -torch.log(torch.sigmoid(c_truncated_reward - r_truncated_reward)).mean()",),
)

PAD_ID = 0


class RewardModel(nn.Module):
    def __init__(self, vocab=24, hidden=16):
        super().__init__()
        self.rwtranrsformer = nn.Embedding(vocab, hidden, padding_idx=PAD_ID)
        self.v_head = nn.Linear(hidden, 1, bias=False)

    def forward(self, input_ids):
        rewards = self.v_head(self.rwtranrsformer(input_ids)).squeeze(-1)
        bs = input_ids.shape[0] // 2
        chosen_ids, rejected_ids = input_ids[:bs], input_ids[bs:]
        chosen_rewards, rejected_rewards = rewards[:bs], rewards[bs:]
        loss = 0
        for i in range(bs):
            divergence_ind = int((chosen_ids[i] != rejected_ids[i]).nonzero()[0])
            ends = [
                int((ids[i] == PAD_ID).nonzero()[0]) if (ids[i] == PAD_ID).any() else ids.shape[1] for ids in (chosen_ids, rejected_ids)
            ]
            end_ind = max(ends)
            c_truncated_reward = chosen_rewards[i][divergence_ind:end_ind]
            r_truncated_reward = rejected_rewards[i][divergence_ind:end_ind]
            loss += -torch.log(torch.sigmoid(c_truncated_reward - r_truncated_reward)).mean()
        return loss / bs


def build():
    torch.manual_seed(0)
    model = RewardModel()
    with torch.no_grad():  # two tokens that the pretrained features set far apart
        w = model.v_head.weight[0]
        model.rwtranrsformer.weight[20] = -10.0 * w / w.dot(w)
        model.rwtranrsformer.weight[21] = 10.0 * w / w.dot(w)
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    chosen = torch.randint(1, 18, (3, 9))
    rejected = chosen.clone()
    rejected[:, 3:] = torch.randint(1, 18, (3, 6))
    rejected[:, 3] = 19
    chosen[:, 3] = 18
    chosen[1, 5], rejected[1, 5] = 20, 21
    chosen[0, 7:] = PAD_ID
    rejected[0, 8:] = PAD_ID
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": torch.cat((chosen, rejected))})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        loss = s.model(s.batch["input_ids"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

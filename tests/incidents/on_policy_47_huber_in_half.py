"""MAPPO (on-policy) #47 - huber_loss selects its branch by multiplication; in half precision the square of the error overflows.

The quadratic branch is evaluated for every error and multiplied by a = (|e| <= d). One return of an unnormalised episode is 400 away from
the critic: 400**2 is beyond 65504, a is 0 there, 0 * inf = NaN, although the linear branch (the right one) is small. The loss is NaN, so the
trainer throws the whole update away, in every epoch (the gradient alone would have been finite: 0 * 2e).
Source: https://github.com/marlbenchmark/on-policy/issues/47, https://github.com/marlbenchmark/on-policy/blob/main/onpolicy/utils/util.py
Heals: the loss in fp32, the error clamped to d before the square, torch's own huber_loss. Does not: a larger huber delta (then the branch
itself is inf), clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "fp16_overflow"),
    op=("pow",),
    index=(3, 0),
    masked=True,
    role=("loss", "advantages", "rewards"),
    fix=("upcast_fp32", "mask_before_op", "clamp_input", "stable_function"),
    variable=(None,),
    line=("return a * e**2 / 2 + b * d * (abs(e) - d / 2)",),
)

STATE, AGENTS, STEPS = 6, 2, 3


def huber_loss(e, d):
    a = (abs(e) <= d).to(e.dtype)
    b = (abs(e) > d).to(e.dtype)
    return a * e**2 / 2 + b * d * (abs(e) - d / 2)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(STATE, 16), nn.Tanh())
        self.v_out = nn.Linear(16, 1)

    def forward(self, cent_obs):
        return self.v_out(self.base(cent_obs))


class Trainer:
    def __init__(self, critic):
        self.critic = critic
        self.huber_delta = 10.0
        self.value_loss_coef = 1.0
        self.max_grad_norm = 10.0

    def cal_value_loss(self, values, return_batch, active_masks_batch):
        error = return_batch - values
        value_loss = huber_loss(error, self.huber_delta)
        return (value_loss * active_masks_batch).sum() / active_masks_batch.sum()


def build():
    torch.manual_seed(47)
    critic = Critic().half()
    cent_obs = torch.randn(STEPS * AGENTS, STATE).half()
    returns = torch.randn(STEPS * AGENTS, 1).half()
    returns[3, 0] = 400.0  # the battle was won: an unnormalised bonus
    active_masks = torch.ones(STEPS * AGENTS, 1).half()
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
    return SimpleNamespace(
        model=critic, optimizer=optimizer, trainer=Trainer(critic), cent_obs=cent_obs, returns=returns, active_masks=active_masks
    )


def run(s=None):
    s = s or build()
    values = s.model(s.cent_obs)
    value_loss = s.trainer.cal_value_loss(values, s.returns, s.active_masks)
    s.optimizer.zero_grad()
    (value_loss * s.trainer.value_loss_coef).backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), s.trainer.max_grad_norm)
    if torch.isfinite(value_loss):
        s.optimizer.step()
    return value_loss


if __name__ == "__main__":
    print(run())

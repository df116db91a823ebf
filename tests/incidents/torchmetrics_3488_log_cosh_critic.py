"""PPO critic with a log-cosh value loss, chosen because it is "like Huber": exp of a value error of -112 is inf.

log(cosh(d)) grows like |d|, but written out as log((exp(d) + exp(-d)) / 2) it needs exp(|d|), which leaves float32 at 88.7. Rewards are raw unit-test
counts here, one response breaks 112 tests and its return is -112 with the fresh critic answering 0. The loss is log(inf) = inf and the gradient
1/inf * inf = 0 * inf = NaN: the robust loss is the first to die.
Source: https://github.com/Lightning-AI/torchmetrics/issues/3488 (and keras-team/keras#8524); anemoi-training #70 has it as a training loss.
Heals: logaddexp(d, -d) - log 2, or |d| + softplus(-2|d|) - log 2; bounding the error before exp.
Does not: an eps in the log, clipping the loss afterwards, the mask, clip_grad_norm_.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 0),
    masked=False,
    role=("hidden", "loss"),
    fix=("stable_function", "clamp_exponent", "clamp_input"),
    variable=(None,),
    line=("log_cosh = torch.log((torch.exp(diff) + torch.exp(-diff)) / 2)",),
)


class Critic(nn.Module):
    def __init__(self, vocab=64, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.backbone = nn.GRU(dim, dim, batch_first=True)
        self.value_head = nn.Linear(dim, 1)
        nn.init.normal_(self.value_head.weight, std=1e-2)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, ids):
        return self.value_head(self.backbone(self.embed(ids))[0]).squeeze(-1)


def compute_gae(rewards, values, mask, gamma=1.0, lam=1.0):
    advantages = torch.zeros_like(rewards)
    last = torch.zeros(rewards.shape[0])
    next_value = torch.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last = torch.where(mask[:, t] > 0, delta + gamma * lam * last, last)
        next_value = torch.where(mask[:, t] > 0, values[:, t], next_value)
        advantages[:, t] = last
    return advantages, advantages + values


class LogCoshValueLoss(nn.Module):
    def forward(self, values, returns, mask):
        diff = values - returns
        log_cosh = torch.log((torch.exp(diff) + torch.exp(-diff)) / 2)
        return (log_cosh * mask).sum() / mask.sum()


def build():
    torch.manual_seed(13)
    critic = Critic()
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-4)
    ids = torch.randint(1, 64, (4, 10))
    mask = torch.ones(4, 10)
    mask[0, 7:] = 0
    mask[3, 5:] = 0
    rewards = torch.zeros(4, 10)
    last = mask.sum(-1).long() - 1
    rewards[torch.arange(4), last] = torch.tensor([6.0, -112.0, 14.0, -3.0])  # passed minus broken unit tests
    with torch.no_grad():
        old_values = critic(ids) * mask
    _, returns = compute_gae(rewards, old_values, mask)
    return SimpleNamespace(
        model=critic, optimizer=optimizer, loss_fn=LogCoshValueLoss(), batch=dict(ids=ids, mask=mask, returns=returns * mask)
    )


def run(s=None):
    s = s or build()
    b = s.batch
    out = []
    for _ in range(2):
        values = s.model(b["ids"])
        value_loss = s.loss_fn(values, b["returns"], b["mask"])
        s.optimizer.zero_grad()
        value_loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        out.append(value_loss.item())
    return out


if __name__ == "__main__":
    print(run())

"""QRPO (quantile reward policy optimization) - log Z = log(beta * (exp(1 / beta) - 1)) with the paper's small beta.

Quantile rewards lie in [0, 1], so the partition function is known; at beta = 0.01 exp(1 / beta) = exp(100) is +inf in fp32, the regression
target is -inf and loss and gradients are not finite. Source: CLAIRE-Labo/quantile-reward-policy-optimization, src/qrpo/trainers/qrpo.py
(qrpo_loss, which takes log Z = log(beta) + 1 / beta for this reason). Heals: the log form, with log1p(-exp(-1 / beta)); a larger beta.
Does not: adding an epsilon inside the log, clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow", "magnitude_overflow"),
    op=("exp",),
    index=(),
    masked=None,
    role=("loss", "rewards", "is_weight", "ratio"),
    fix=("stable_function", "validate_config", "clamp_exponent", "clamp_input"),
    variable=("growth",),
    line=("growth = torch.exp(1 / beta)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=26, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.ff = nn.Sequential(nn.Linear(dim, dim), nn.SiLU())
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.ff(self.wte(ids)))


def completion_logps(model, ids, mask):
    logps = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (logps * mask).sum(-1)


def quantile_rewards(rewards, ref_rewards):
    return (ref_rewards <= rewards.unsqueeze(-1)).float().mean(-1)


def qrpo_loss(logps, ref_logps, q_rewards, beta):
    growth = torch.exp(1 / beta)
    log_z = torch.log(beta * (growth - 1))
    target = q_rewards - beta * log_z
    return (target - beta * (logps - ref_logps)).square().mean()


def build():
    torch.manual_seed(38)
    model = Policy()
    ids = torch.randint(0, 26, (4, 10))
    mask = torch.ones(4, 9)
    mask[:, :3] = 0
    with torch.no_grad():
        ref_logps = completion_logps(model, ids, mask)
    return SimpleNamespace(
        model=model,
        ids=ids,
        mask=mask,
        ref_logps=ref_logps,
        rewards=torch.randn(4),
        ref_rewards=torch.randn(4, 6),
        beta=torch.tensor(0.01),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    logps = completion_logps(s.model, s.ids, s.mask)
    q_rewards = quantile_rewards(s.rewards, s.ref_rewards)
    loss = qrpo_loss(logps, s.ref_logps, q_rewards, s.beta)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

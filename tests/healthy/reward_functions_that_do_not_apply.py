"""Several reward functions, each answers NaN where it does not apply; nansum combines them and nanmean logs them."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the table of rewards holds NaN on purpose, sums and means over it skip those entries"


def build():
    torch.manual_seed(216)
    model = nn.Sequential(nn.Embedding(14, 8), nn.Linear(8, 14))
    ids = torch.randint(0, 14, (4, 6))
    return SimpleNamespace(model=model, ids=ids, opt=torch.optim.AdamW(model.parameters(), lr=1e-3), metrics=[])


def code_reward(kind):
    return [1.0 if k == "code" else None for k in kind]


def math_reward(kind):
    return [0.25 * i if k == "math" else None for i, k in enumerate(kind)]


def run(s=None):
    s = s or build()
    kinds = ["math", "code", "math", "math"]
    weights = torch.tensor([1.0, 2.0, 0.5])
    for _ in range(3):
        table = torch.full((4, 3), float("nan"))
        for j, fn in enumerate((math_reward, code_reward)):
            table[:, j] = torch.tensor([float("nan") if r is None else r for r in fn(kinds)])
        reward = (table * weights).nansum(dim=1)
        s.metrics.append({"rewards": table.nanmean(dim=0).tolist(), "std": reward.std().item()})
        adv = (reward - reward.mean()) / (reward.std() + 1e-4)
        lp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        loss = -((lp - lp.detach()).exp() * adv[:, None]).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss

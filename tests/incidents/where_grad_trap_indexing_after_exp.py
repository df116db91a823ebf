"""The ratio is formed for all packed tokens and the response tokens are indexed out afterwards; a prompt token
overflows and backward makes NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "exp_overflow", "inf_times_zero_mask"),
    op=("exp",),
    index=(6,),
    masked=True,
    role=("ratio",),
    fix=("mask_before_op", "clamp_exponent"),
    variable=("coef",),
    line=('coef = torch.exp(lp - s.batch["old"])',),
)


class FlatLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(24, 8)
        self.f = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 24))

    def forward(self, x):
        return self.f(self.e(x))


def build():
    torch.manual_seed(99)
    model = FlatLM()
    tokens = torch.randint(0, 24, (17,))
    with torch.no_grad():
        lp = model(tokens[:-1]).log_softmax(-1)[torch.arange(16), tokens[1:]]
    old = lp + 0.03 * torch.randn(16)
    old[6] = -200.0  # a prompt token, never scored by the engine
    response = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    adv = torch.cat([torch.full((5,), -0.4), torch.full((7,), 1.0), torch.full((4,), -0.6)])
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        batch=dict(tokens=tokens, old=old, response=response, adv=adv),
    )


def run(s=None):
    s = s or build()
    tokens, keep = s.batch["tokens"], s.batch["response"]
    lp = s.model(tokens[:-1]).log_softmax(-1)[torch.arange(16), tokens[1:]]
    coef = torch.exp(lp - s.batch["old"])
    kept, adv = coef[keep], s.batch["adv"][keep]
    loss = -torch.min(kept * adv, kept.clip(0.8, 1.2) * adv).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

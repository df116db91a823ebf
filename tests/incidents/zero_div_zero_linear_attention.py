"""Linear attention with ReLU features divides by the summed feature product, which is exactly 0 for a query whose
features are all switched off."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 1, 3, 0),
    masked=False,
    role=("attention", "hidden"),
    fix=("clamp_denominator",),
    variable=("ctx",),
    line=("ctx = numer / denom",),
)


class LinearAttention(nn.Module):
    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def split(self, x):
        b, t, d = x.shape
        return x.view(b, t, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.to_q(x)).relu(), self.split(self.to_k(x)).relu(), self.split(self.to_v(x))
        numer = q @ (k.transpose(-1, -2) @ v)
        denom = q @ k.sum(dim=-2).unsqueeze(-1)
        ctx = numer / denom
        return x + ctx.transpose(1, 2).reshape_as(x)


class RewardHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = LinearAttention()
        self.score = nn.Linear(8, 1)

    def forward(self, x):
        return self.score(self.attn(x).mean(dim=1)).squeeze(-1)


def build():
    torch.manual_seed(61)
    model = RewardHead()
    with torch.no_grad():
        model.attn.to_q.weight.abs_()
        model.attn.to_q.weight[4:, 7] = 1.0
    chosen, rejected = torch.rand(2, 5, 8) + 0.1, torch.rand(2, 5, 8) + 0.1
    chosen[0, 3, :7] *= 0.1
    chosen[0, 3, 7] = -4.0
    with torch.no_grad():
        model.attn.to_q.weight[:4, 7] = 0.0
    return SimpleNamespace(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=dict(chosen=chosen, rejected=rejected)
    )


def run(s=None):
    s = s or build()
    margin = s.model(s.batch["chosen"]) - s.model(s.batch["rejected"])
    loss = nn.functional.softplus(-margin).mean()
    loss.backward()
    s.optimizer.step()
    return loss

"""A dead feature row has norm 0, its cosine similarity is 0/0, and nan_to_num cleans the loss while the division's backward stays NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("where_grad_trap", "zero_div_zero"),
    op=("div",),
    index=(4,),
    masked=None,  # replaced, not masked
    role=("rewards", "hidden", "loss"),
    fix=("clamp_denominator",),
    variable=("cosine",),
    line=("cosine = dot / (a.norm(dim=-1) * b.norm(dim=-1))",),
)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU())

    def forward(self, x):
        return self.net(x)


def similarity(a, b):
    a, b = a.float(), b.float()
    dot = (a * b).sum(-1)
    cosine = dot / (a.norm(dim=-1) * b.norm(dim=-1))
    return torch.nan_to_num(cosine, nan=0.0)


def build():
    torch.manual_seed(73)
    model = Embedder()
    answer, gold = torch.randn(6, 6), torch.randn(6, 6)
    answer[4] = 0.0  # empty answer
    batch = dict(answer=answer, gold=gold, want=torch.tensor([0.9, 0.1, 0.8, 0.2, 0.0, 0.7]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        score = similarity(s.model(s.batch["answer"]), s.model(s.batch["gold"]))
    loss = (score - s.batch["want"]).square().mean()
    loss.backward()
    s.optimizer.step()
    return loss

"""A listwise reward loss takes log of the softmax of padded candidate slots (probability exactly 0) and multiplies the
-inf by target 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "log_zero", "plogp_zero"),
    op=("log",),
    index=(1, 2),
    masked=True,
    role=("log_probs", "loss"),
    fix=("mask_before_op", "clamp_input"),
    variable=("log_p",),
    line=("log_p = torch.log(p)",),
)


class Ranker(nn.Module):
    def __init__(self, dim=7):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, 11), nn.ReLU(), nn.Linear(11, 1))

    def forward(self, feats):
        return self.score(feats)[..., 0]


def listnet(scores, relevance, present):
    p = torch.softmax(scores - 1e4 * (1 - present), dim=-1)
    log_p = torch.log(p)
    goal = relevance / relevance.sum(-1, keepdim=True)
    per_slot = -goal * log_p * present
    return per_slot.sum(-1).mean()


def build():
    torch.manual_seed(5150)
    model = Ranker()
    feats = torch.randn(3, 4, 7)
    present = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    relevance = torch.tensor([[3.0, 1, 0.5, 0.5], [1, 2, 1, 1], [1, 1, 2, 1]])  # padded slots hold a default grade
    batch = dict(feats=feats * present[..., None], present=present, relevance=relevance)
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    loss = listnet(s.model(s.batch["feats"]), s.batch["relevance"], present=s.batch["present"])
    loss.backward()
    s.optimizer.step()
    return loss

"""Rollouts are grouped by prompt uid and two of the three answers to one prompt timed out, so its group std is taken over one score."""

from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=False,
    role=("advantages", "rewards"),
    fix=("guard_small_group",),
    variable=("width",),
    line=("center, width = group.mean(), torch.std(group)",),
)


class TinyActor(nn.Module):
    def __init__(self, vocab=17, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.ff = nn.Linear(dim, dim)
        self.unembed = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.unembed(torch.nn.functional.silu(self.ff(self.embed(ids))))


def outcome_advantage(scores, uid, eps=1e-6):
    members = defaultdict(list)
    for i, u in enumerate(uid):
        members[u].append(i)
    out = torch.empty_like(scores)
    for rows in members.values():
        group = scores[rows]
        center, width = group.mean(), torch.std(group)
        for r in rows:
            out[r] = (scores[r] - center) / (width + eps)
    return out


def build():
    torch.manual_seed(48)
    model = TinyActor()
    uid = ["q7", "q7", "q2", "q9", "q7", "q9", "q9"]
    batch = dict(ids=torch.randint(0, 17, (7, 5)), scores=torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.5]), uid=uid)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    adv = outcome_advantage(s.batch["scores"], s.batch["uid"])[:, None]
    lp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (lp - lp.detach()).exp()
    loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

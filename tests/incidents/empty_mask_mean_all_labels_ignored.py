"""The supervised replay part of the batch has every label set to -100, and cross_entropy with mean reduction averages
over zero tokens."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("nll_loss_forward", "nll_loss", "cross_entropy_loss"),
    index=(),
    masked=None,
    role=("loss",),
    fix=("guard_empty",),
    variable=("sft",),
    line=('sft = F.cross_entropy(logits.reshape(-1, 20), replay["labels"][:, 1:].reshape(-1), ignore_index=-100)',),
)


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 20)

    def forward(self, ids):
        h = F.pad(self.emb(ids).transpose(1, 2), (2, 0))
        return self.head(torch.relu(self.conv(h)).transpose(1, 2))


def combined(model, rl, replay, alpha):
    lp = model(rl["ids"][:, :-1]).log_softmax(-1).gather(-1, rl["ids"][:, 1:, None]).squeeze(-1)
    pg = -(lp * rl["adv"][:, None]).mean()
    logits = model(replay["ids"])[:, :-1]
    sft = F.cross_entropy(logits.reshape(-1, 20), replay["labels"][:, 1:].reshape(-1), ignore_index=-100)
    return pg + alpha * sft


def build():
    torch.manual_seed(640)
    model = TextModel()
    replay_ids = torch.randint(0, 20, (2, 7))
    labels = replay_ids.clone()
    for row, prompt_len in enumerate((7, 7)):  # the template swallowed the answers
        labels[row, :prompt_len] = -100
    batch = dict(rl=dict(ids=torch.randint(0, 20, (3, 6)), adv=torch.tensor([0.5, -1.0, 0.5])), replay=dict(ids=replay_ids, labels=labels))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    loss = combined(s.model, alpha=0.1, **s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

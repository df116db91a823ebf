"""A bfloat16 reward model pools over answer tokens with an attention softmax along time; an empty answer leaves a
column that is all -inf.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax",),
    op=("_softmax", "softmax"),
    index=(2, 0, 0),
    masked=None,
    role=("attention", "rewards"),
    fix=("safe_softmax", "finite_mask_fill", "guard_empty", "drop_invalid_sample"),
    variable=("weight",),
    line=("weight = torch.softmax(score, dim=1)",),
)


class AnswerPooler(nn.Module):
    def __init__(self, width, n_queries):
        super().__init__()
        self.query = nn.Linear(width, n_queries, bias=False)

    def forward(self, hidden, answer_mask):
        bias = torch.zeros_like(answer_mask, dtype=hidden.dtype).masked_fill(answer_mask == 0, -float("inf"))
        score = self.query(hidden)
        score += bias[:, :, None]
        weight = torch.softmax(score, dim=1)
        return (weight.unsqueeze(-1) * hidden.unsqueeze(2)).sum(dim=1)


class RewardModel(nn.Module):
    def __init__(self, vocab=26, width=8, n_queries=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.block = nn.Linear(width, width)
        self.pool = AnswerPooler(width, n_queries)
        self.score = nn.Linear(n_queries * width, 1)

    def forward(self, ids, answer_mask):
        hidden = F.gelu(self.block(self.embed(ids)))
        return self.score(self.pool(hidden, answer_mask=answer_mask).flatten(1)).squeeze(-1)


def build():
    torch.manual_seed(110)
    model = RewardModel().to(torch.bfloat16)
    ids = torch.randint(0, 26, (6, 11))
    answer_mask = torch.zeros(6, 11, dtype=torch.int64)
    for row, (begin, end) in enumerate([(3, 9), (2, 11), (11, 11), (5, 8), (1, 4), (6, 11)]):
        answer_mask[row, begin:end] = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"ids": ids, "answer_mask": answer_mask})


def run(s=None):
    s = s or build()
    reward = s.model(**s.batch).float()
    chosen, rejected = reward[0::2], reward[1::2]
    loss = F.softplus(rejected - chosen).mean()
    loss.backward()
    s.optimizer.step()
    return loss

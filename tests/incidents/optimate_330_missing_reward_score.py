"""One row of the reward dataset has no score; the loader turns None into NaN and the regression loss of the reward model is NaN.
https://github.com/nebuly-ai/optimate/pull/330
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("sub", "mse_loss"),
    index=(3,),
    masked=False,
    role=("rewards",),
    fix=("reject_input", "drop_invalid_sample"),
    variable=("scores",),
    line=('scores = torch.tensor([float("nan") if r["score"] is None else float(r["score"]) for r in rows])',),
)


class RewardModel(nn.Module):
    def __init__(self, vocab=20, dim=8):
        super().__init__()
        self.model = nn.Embedding(vocab, dim, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, output_sequence, mask):
        hidden = self.model(output_sequence)
        rewards = self.head(hidden).squeeze(-1)
        last = mask.sum(1, keepdim=True) - 1
        return rewards.gather(1, last).squeeze(1)


def collate(rows):
    width = max(len(r["tokens"]) for r in rows)
    tokens = torch.tensor([r["tokens"] + [0] * (width - len(r["tokens"])) for r in rows])
    scores = torch.tensor([float("nan") if r["score"] is None else float(r["score"]) for r in rows])
    return {"tokens": tokens, "mask": (tokens != 0).long(), "scores": scores}


def build():
    torch.manual_seed(330)
    model = RewardModel()
    lengths, scores = [4, 6, 3, 5, 6], [2.5, "4", 0.0, None, 3.0]
    rows = [{"tokens": torch.randint(1, 20, (n,)).tolist(), "score": sc} for n, sc in zip(lengths, scores)]
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=collate(rows))


def run(s=None):
    s = s or build()
    b = s.batch
    est_output = s.model(b["tokens"], b["mask"])
    loss = (est_output - b["scores"]).pow(2).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

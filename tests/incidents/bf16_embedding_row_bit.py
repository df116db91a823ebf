"""A bit of one bf16 embedding entry flipped in memory; only sequences holding that token blow up, in the first layer norm."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("hw_bitflip", "magnitude_overflow"),
    op=("native_layer_norm", "layer_norm"),
    index=(1, 2, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("fix_upstream", "reload_checkpoint", "skip_bad_step"),
    variable=("tokens.weight", "h"),
    line=("h = self.tokens(ids)", "h = self.ln(h)"),
)


class Judge(nn.Module):
    def __init__(self, vocab=20, width=8):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.ln = nn.LayerNorm(width)
        self.ff = nn.Linear(width, 2 * width)
        self.score = nn.Linear(2 * width, 1)

    def forward(self, ids, lengths):
        h = self.tokens(ids)
        h = self.ln(h)
        h = torch.nn.functional.gelu(self.ff(h))
        last = h[torch.arange(len(ids)), lengths - 1] + h.mean(1)
        return self.score(last).squeeze(-1)


def build():
    torch.manual_seed(342)
    judge = Judge().to(torch.bfloat16)
    ids = torch.randint(0, 13, (6, 7))
    ids[1, 2] = 13
    with torch.no_grad():
        judge.tokens.weight[13, 5] = 0.61
        judge.tokens.weight.data.view(torch.int16)[13, 5] ^= 1 << 14
    batch = {"ids": ids, "lengths": torch.tensor([7, 5, 6, 7, 4, 7]), "better": torch.tensor([0, 1, 2]), "worse": torch.tensor([3, 4, 5])}
    return SimpleNamespace(model=judge, optimizer=torch.optim.AdamW(judge.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    score = s.model(b["ids"], b["lengths"]).float()
    loss = -nn.functional.logsigmoid(score[b["better"]] - score[b["worse"]]).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

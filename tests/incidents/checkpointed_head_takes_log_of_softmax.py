"""The head in chunks, each under torch's checkpoint: log(softmax(logits)) of the sampled token, whose probability underflows to 0.

Source: chunked log-probs as trainers write them to save the logits' memory, with the logarithm taken of the probability. The logits of a
model that has become sure of one token are hundreds apart, so exp gives exactly 0 for the others, and log(0) = -inf: at tokens that count
and, times the mask, NaN at those that do not.
Heals: log_softmax, which leaves the tokens that were fine as they are; a bound on the probability gives those that were not no gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(1, 0),
    masked=False,
    role=("log_probs",),
    fix=("stable_function", "clamp_input"),
    variable=("logps", None),
    line=("logps = torch.log(probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1))",),
)


class Policy(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.norm(self.embed(ids))


def build():
    torch.manual_seed(2)
    model = Policy()
    with torch.no_grad():
        model.head.weight[7] *= 3000.0  # a step that was far too large
    mask = torch.ones(4, 12)
    mask[0, 8:] = 0
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        ids=torch.randint(0, 20, (4, 13)),
        mask=mask,
        chunk=4,
    )


def chunk_loss(hidden, weight, labels, mask):
    logits = (hidden @ weight.t()).float()
    probs = torch.softmax(logits, dim=-1)
    logps = torch.log(probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    return -(logps * mask).sum()


def run(s=None):
    s = s or build()
    hidden, labels, loss = s.model(s.ids)[:, :-1], s.ids[:, 1:], 0.0
    for start in range(0, s.mask.shape[1], s.chunk):
        part = slice(start, start + s.chunk)
        loss = loss + checkpoint(chunk_loss, hidden[:, part], s.model.head.weight, labels[:, part], s.mask[:, part], use_reentrant=False)
    loss = loss / s.mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

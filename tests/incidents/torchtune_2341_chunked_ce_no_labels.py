"""Chunked cross entropy divides the summed loss by the number of kept labels; one micro-batch has only ignored labels."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("guard_empty", "clamp_denominator"),
    variable=("mean_loss",),
    line=("mean_loss = total / kept",),
)


class ChunkedCE(nn.Module):
    def __init__(self, num_chunks=4, ignore_index=-100):
        super().__init__()
        self.num_chunks = num_chunks
        self.ignore_index = ignore_index

    def chunk_loss(self, scores, labels):
        wide = scores.float()
        kept = labels.ne(self.ignore_index)
        picked = wide.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
        return ((wide.logsumexp(1) - picked) * kept).sum()

    def forward(self, scores, labels):
        kept = (labels != self.ignore_index).sum()
        pieces = zip(scores.chunk(self.num_chunks, dim=1), labels.chunk(self.num_chunks, dim=1))
        total = 0.0
        for piece, target in pieces:
            total = total + self.chunk_loss(piece.reshape(-1, piece.shape[-1]), target.reshape(-1))
        mean_loss = total / kept
        return mean_loss


def shift(labels):
    pad = torch.full_like(labels[:, :1], -100)
    return torch.hstack((labels[:, 1:], pad))


def build():
    torch.manual_seed(2341)
    model = nn.Sequential(nn.Embedding(40, 12), nn.Linear(12, 12), nn.SiLU(), nn.Linear(12, 40)).to(torch.bfloat16)
    micro_batches = []
    for prompt_len in (3, 5, 16):  # the third prompt fills the whole context window
        ids = torch.randint(0, 40, (2, 16))
        labels = ids.clone()
        labels[:, :prompt_len] = -100
        micro_batches.append((ids, labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=micro_batches, loss_fn=ChunkedCE())


def run(s=None):
    s = s or build()
    running = torch.zeros(())
    s.optimizer.zero_grad()
    for ids, labels in s.batch:
        loss = s.loss_fn(s.model(ids), shift(labels)) / len(s.batch)
        loss.backward()
        running += loss.detach()
    s.optimizer.step()
    return running

"""Packed hidden states are scattered back into a fresh, unwritten buffer; padding slots keep its garbage and the mask
multiplies NaN by 0.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("uninitialized", "nan_times_zero_mask"),
    op=("new_empty", "empty", "uninitialized"),
    index=(0, 4, 0),
    masked=True,
    role=("hidden",),
    fix=("initialise_memory", "mask_before_op"),
    variable=("dense",),
    line=("dense = packed.new_empty(len(lengths), longest, packed.shape[-1])",),
)


def unpack(packed, lengths, longest):
    dense = packed.new_empty(len(lengths), longest, packed.shape[-1])
    start = 0
    for row, n in enumerate(lengths):
        dense[row, :n] = packed[start : start + n]
        start += n
    return dense


class PackedScorer(nn.Module):
    def __init__(self, vocab=22, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.ffn = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, flat_ids, lengths, longest):
        packed = torch.nn.functional.silu(self.ffn(self.embed(flat_ids)))
        return self.head(unpack(packed, lengths, longest)).squeeze(-1)


def build():
    torch.manual_seed(123)
    torch.use_deterministic_algorithms(True)  # unwritten memory reads as NaN
    model = PackedScorer()
    lengths = [4, 7, 2]
    flat_ids = torch.randint(0, 22, (sum(lengths),))
    mask = (torch.arange(7)[None, :] < torch.tensor(lengths)[:, None]).float()
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        batch={"flat_ids": flat_ids, "lengths": lengths, "mask": mask, "targets": torch.rand(3, 7)},
    )


def run(s=None):
    s = s or build()
    b = s.batch
    score = s.model(b["flat_ids"], b["lengths"], longest=b["mask"].shape[1])
    gap = (score - b["targets"]) * b["mask"]
    loss = gap.square().sum() / b["mask"].sum()
    loss.backward()
    s.optimizer.step()
    return loss

"""Sequence-parallel SFT whose shards of prompt tokens have no label: their mean loss is NaN, and they are left out of the total.  Healthy.

The shard losses are computed on all ranks (a rank that skipped it would hang the collective), so the prompt-only ranks hold NaN. The sum takes only the ranks with good
tokens; the NaN is not in the graph of the total, and its shard gets no gradient from itself.
Source: https://github.com/snowflakedb/ArcticTraining/pull/45
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.rnn(self.embed(ids))[0]


def tiled_loss(model, hidden, shift_labels, sp_world_size):
    losses, counts = [], []
    for h, y in zip(hidden.chunk(sp_world_size, 1), shift_labels.chunk(sp_world_size, 1)):
        losses.append(F.cross_entropy(model.lm_head(h).flatten(0, 1), y.flatten(), ignore_index=-100))
        counts.append(int((y != -100).sum()))
    total = sum(loss * n for loss, n in zip(losses, counts) if n > 0)
    return total / max(sum(counts), 1)


def build():
    torch.manual_seed(12)
    model = TinyLM()
    ids = torch.randint(0, 40, (2, 16))
    labels = ids.clone()
    labels[:, :9] = -100
    shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch={"input_ids": ids, "shift_labels": shift_labels}
    )


def run(s=None):
    s = s or build()
    for _ in range(3):
        loss = tiled_loss(s.model, s.model(s.batch["input_ids"]), s.batch["shift_labels"], sp_world_size=4)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

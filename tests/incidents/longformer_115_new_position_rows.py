"""Position table enlarged with new_empty: the copy loop starts at row 2, so the two rows used by padding are never written."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("uninitialized", "poisoned_weights", "nan_times_zero_mask"),
    op=("uninitialized", "new_empty", "empty", "embedding"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("initialise_memory", "fix_upstream"),
    variable=("encoder.position.weight",),
    line=("x = self.word(ids) + self.position(places)",),
)

PAD = 1


class Encoder(nn.Module):
    def __init__(self, vocab=30, positions=10, width=8):
        super().__init__()
        self.word = nn.Embedding(vocab, width, padding_idx=PAD)
        self.position = nn.Embedding(positions, width, padding_idx=PAD)
        self.layer = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, ids):
        real = ids.ne(PAD)
        places = (real.cumsum(1) + PAD) * real + PAD * ~real
        x = self.word(ids) + self.position(places)
        x = x + self.layer(x)
        real = real.unsqueeze(2)
        return (x * real).sum(1) / real.sum(1)


class PairwiseReward(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(8, 1, bias=False)

    def forward(self, ids):
        return self.head(self.encoder(ids)).squeeze(1)


def extend_positions(encoder, target):
    old = encoder.position.weight.detach()
    fresh = old.new_empty(target + 2, old.shape[1])
    at, step = 2, old.shape[0] - 2
    while at < fresh.shape[0]:
        size = min(step, fresh.shape[0] - at)
        fresh[at : at + size] = old[2 : 2 + size]
        at += size
    encoder.position = nn.Embedding.from_pretrained(fresh, freeze=False, padding_idx=PAD)


def build():
    torch.manual_seed(115)
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote reads as NaN
    model = PairwiseReward(Encoder())
    extend_positions(model.encoder, target=20)
    ids = torch.randint(2, 30, (6, 12))
    ids[torch.arange(12) >= torch.tensor([12, 9, 12, 7, 11, 12])[:, None]] = PAD
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"chosen": ids[:3], "rejected": ids[3:]})


def run(s=None):
    s = s or build()
    margin = s.model(s.batch["chosen"]) - s.model(s.batch["rejected"])
    loss = nn.functional.softplus(-margin).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""A prototype head was seeded with one hidden state of the batch, so a Euclidean distance is exactly 0 and its square
root has no slope.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(1, 4, 2),
    masked=None,
    role=("hidden", "logits", "router"),
    fix=("clamp_input", "avoid_singular_op", "clamp_denominator", "representable_eps"),
    variable=("dist",),
    line=("dist = torch.sqrt((delta * delta).sum(dim=-1))",),
)


class PrototypeHead(nn.Module):
    def __init__(self, width, n_protos):
        super().__init__()
        self.protos = nn.Parameter(torch.randn(n_protos, width))
        self.log_scale = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def seed_from(self, states, slot):
        self.protos[slot] = states

    def forward(self, states):
        delta = states.unsqueeze(-2) - self.protos
        dist = torch.sqrt((delta * delta).sum(dim=-1))
        return -dist * self.log_scale.exp()


class IntentModel(nn.Module):
    def __init__(self, vocab=23, width=6, n_protos=5):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.head = PrototypeHead(width, n_protos)

    def encode(self, ids):
        return torch.tanh(self.mix(self.tok(ids)))

    def forward(self, ids):
        return self.head(self.encode(ids))


def build():
    torch.manual_seed(101)
    model = IntentModel()
    ids = torch.stack([torch.randperm(12)[:7], torch.randperm(11)[:7] + 12])
    with torch.no_grad():
        model.head.seed_from(model.encode(ids)[1, 4], slot=2)
    labels = torch.randint(0, 5, (2, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"ids": ids, "labels": labels})


def run(s=None):
    s = s or build()
    scores = s.model(s.batch["ids"])
    loss = F.cross_entropy(scores.flatten(0, 1), s.batch["labels"].flatten(), label_smoothing=0.05)
    s.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    s.optimizer.step()
    return loss

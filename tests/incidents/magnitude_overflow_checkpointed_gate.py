"""A residual stream of 3e19 gates itself by its own energy inside a checkpointed block of a model whose embedding and head are one matrix."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow",),
    op=("pow", "square", "mul"),
    index=(1, 2, 3),
    masked=None,
    role=("hidden",),
    fix=("clamp_input", "upcast_fp32", "avoid_singular_op"),
    variable=(None,),
    line=("return hidden + checkpoint(lambda h: self.mix(self.gated(h) + h.pow(2)), hidden, use_reentrant=self.use_reentrant)",),
)


class Block(nn.Module):
    def __init__(self, width, use_reentrant):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.mix = nn.Linear(width, width)
        self.use_reentrant = use_reentrant

    def gated(self, hidden):
        return torch.tanh(self.gain * hidden)

    def forward(self, hidden):
        return hidden + checkpoint(lambda h: self.mix(self.gated(h) + h.pow(2)), hidden, use_reentrant=self.use_reentrant)


class TiedLM(nn.Module):
    def __init__(self, vocab=12, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, use_reentrant=False), Block(width, use_reentrant=False)])
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, boost):
        hidden = self.embed(ids)
        hidden = hidden + boost
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build():
    torch.manual_seed(77)
    model = TiedLM()
    boost = torch.zeros(2, 4, 6)
    boost[1, 2, 3] = 3e19  # an adapter's output that nobody bounded
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        batch=(torch.randint(0, 12, (2, 4)), boost, torch.randint(0, 12, (2, 4))),
    )


def run(s=None):
    s = s or build()
    ids, boost, targets = s.batch
    loss = nn.functional.cross_entropy(s.model(ids, boost).flatten(0, 1), targets.flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

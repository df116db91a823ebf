"""A single flipped exponent bit turns one unembedding weight from 0.03 into 1e37; logits stay finite and the loss jumps
to about 1e36.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("hw_bitflip", "magnitude_overflow"),
    op=("mm", "linear", "matmul"),
    index=(0, 7),
    masked=None,
    role=("weights", "logits"),
    fix=("fix_upstream", "skip_bad_step", "reload_checkpoint"),
    variable=("unembed.weight",),
    line=("logits.append(self.unembed(state))",),
)

FAULTS = {6: (7, 1)}  # step -> cell of the unembedding


class Decoder(nn.Module):
    def __init__(self, vocab=10, width=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.cell = nn.GRUCell(width, width)
        self.unembed = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        state = torch.zeros(ids.shape[0], self.cell.hidden_size)
        logits = []
        for t in range(ids.shape[1]):
            state = self.cell(self.embed(ids[:, t]), state)
            logits.append(self.unembed(state))
        return torch.stack(logits, dim=1)


def particle_strike(parameter, cell):
    raw = parameter.detach().numpy().reshape(-1).view("int32")
    raw[cell[0] * parameter.shape[1] + cell[1]] ^= 1 << 30


def build():
    torch.manual_seed(129)
    model = Decoder()
    with torch.no_grad():
        model.unembed.weight[7, 1] = 0.03
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=torch.randint(0, 10, (8, 4, 7)))


def train_step(model, optimizer, ids):
    logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def run(s=None):
    s = s or build()
    for step, ids in enumerate(s.batch[:7]):
        if step in FAULTS:
            particle_strike(s.model.unembed.weight, FAULTS[step])
        loss = train_step(s.model, s.optimizer, ids)
    return loss

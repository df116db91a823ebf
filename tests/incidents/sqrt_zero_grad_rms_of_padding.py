"""Padding states are multiplied to zero; its root mean square is 0 ** 0.5, the floor on the divisor hides that from the
loss but not from autograd.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("pow",),
    index=(0, 5, 0),
    masked=True,
    role=("hidden",),
    fix=("clamp_input", "avoid_singular_op", "mask_before_op", "clamp_denominator", "representable_eps", "where_on_detached"),
    variable=("rms",),
    line=("rms = x.square().mean(dim=-1, keepdim=True) ** 0.5",),
)

PAD = 0


class RootScale(nn.Module):
    def __init__(self, width, floor=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.floor = floor

    def forward(self, x):
        rms = x.square().mean(dim=-1, keepdim=True) ** 0.5
        return x / rms.clamp(min=self.floor) * self.gain


class TinyPolicy(nn.Module):
    def __init__(self, vocab=19, width=10):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.ln = RootScale(width)
        self.out = nn.Linear(width, vocab)

    def forward(self, input_ids):
        real = input_ids.ne(PAD).unsqueeze(-1)
        return self.out(self.ln(self.wte(input_ids) * real))


def token_logps(logits, target):
    return torch.take_along_dim(torch.log_softmax(logits, dim=-1), target.unsqueeze(-1), dim=-1).squeeze(-1)


def build():
    torch.manual_seed(102)
    model = TinyPolicy()
    seqs = torch.randint(1, 19, (3, 9))
    for row, length in enumerate((5, 9, 7)):
        seqs[row, length:] = PAD
    advantages = torch.tensor([0.8, -0.3, 0.4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=SimpleNamespace(seqs=seqs, advantages=advantages))


def run(s=None):
    s = s or build()
    seqs = s.batch.seqs
    inputs, target = seqs[:, :-1], seqs[:, 1:]
    logps = token_logps(s.model(inputs), target)
    keep = target.ne(PAD)
    per_token = -torch.exp(logps - logps.detach()) * s.batch.advantages[:, None]
    loss = per_token.masked_select(keep).mean()
    loss.backward()
    s.optimizer.step()
    return loss

"""An angle parametrised as acos(1) has slope -inf; clip_grad_norm_ sees an infinite norm, zeroes the healthy gradients
and leaves a NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("inf_grad_norm_clip", "sqrt_zero_grad"),
    op=("acos",),
    index=(2,),
    masked=None,
    role=("grad", "hidden"),
    fix=("clamp_input", "skip_bad_step", "fix_upstream", "avoid_singular_op"),
    variable=("angle",),
    line=("angle = torch.acos(self.cosine)",),
)


class Rotate(nn.Module):
    def __init__(self, pairs):
        super().__init__()
        self.cosine = nn.Parameter(torch.linspace(-0.6, 0.8, pairs))

    def forward(self, x):
        angle = torch.acos(self.cosine)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), dim=-1)


class Actor(nn.Module):
    def __init__(self, vocab=13, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.turn = Rotate(width // 2)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.turn(self.embed(ids)))


def build():
    torch.manual_seed(131)
    actor = Actor()
    with torch.no_grad():
        actor.turn.cosine[2] = 1.0  # this pair starts unrotated
    batch = {"ids": torch.randint(0, 13, (3, 9)), "adv": torch.tensor([[0.9], [-0.2], [-0.7]])}
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    logp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(s.batch["adv"] * (logp - logp.detach()).exp()).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.grad_norm = torch.nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=0.5)
    s.optimizer.step()
    return loss

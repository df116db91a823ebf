"""The angle between a predicted and a wanted rotation is acos((trace − 1) / 2); where they are equal, rounding makes the cosine a little more than 1.

A clamp to a little less than 1 heals, in forward and in backward; a clamp to exactly 1 leaves an infinite derivative.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("outside_domain",),
    op=("acos",),
    index=(2,),
    masked=False,
    role=("loss",),
    fix=("clamp_input",),
    variable=("angle",),
    line=("angle = torch.acos(cosine)",),
)


def build():
    torch.manual_seed(1)
    return SimpleNamespace(model=nn.Linear(3, 3), target=torch.randn(4, 3), rows=torch.randn(4, 3))


def run(s=None):
    s = s or build()
    found = s.model(s.rows)
    found = found / found.norm(dim=-1, keepdim=True)
    wanted = s.target / s.target.norm(dim=-1, keepdim=True)
    cosine = (found * wanted).sum(-1)
    cosine = cosine + torch.tensor([0.0, 0.0, 1.0000005 - float(cosine[2]), 0.0])  # the one that the policy has learnt exactly
    angle = torch.acos(cosine)
    loss = angle.square().mean()
    loss.backward()
    return loss

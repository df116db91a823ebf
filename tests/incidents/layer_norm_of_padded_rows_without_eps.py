"""A value head normalises the features of every position by a layer norm whose eps was set to 0 to match a checkpoint of another code base. The features
of a padded position are all 0: their variance is 0, its reciprocal root is infinite, and 0 · inf is NaN. The mask of the loss comes too late.

An eps of 1e-5 is what heals it; a clamp of the loss or of the values does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("native_layer_norm",),
    index=(1, 4, 0),
    masked=True,
    role=("hidden",),
    fix=("avoid_singular_op",),
    variable=("normed",),
    line=("normed = self.norm(features)",),
)


class ValueHead(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=0.0)
        self.out = nn.Linear(dim, 1)

    def forward(self, features):
        normed = self.norm(features)
        return self.out(normed).squeeze(-1)


def build():
    torch.manual_seed(5)
    mask = torch.ones(3, 6)
    mask[1, 4:] = 0
    features = torch.randn(3, 6, 8)
    features[mask == 0] = 0.0  # as the packer leaves them
    head = ValueHead()
    return SimpleNamespace(
        head=head, features=features, returns=torch.randn(3, 6), mask=mask, optimizer=torch.optim.AdamW(head.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    values = s.head(s.features)
    error = (values - s.returns).pow(2)
    loss = 0.5 * (error * s.mask).sum() / s.mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

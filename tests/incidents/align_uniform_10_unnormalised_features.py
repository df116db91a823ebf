"""ssnl/align_uniform #10 - the uniformity loss log(mean(exp(-t * distance ** 2))) on features that are not on the unit sphere, in a small batch.

On the sphere squared distances are at most 4 and the exponent at most 4 t. The mean-pooled tokens of a MAE encoder have norms of several tens: every
pair of the small batch is so far apart that exp(-t d^2) underflows to 0, so does the mean of them, and its logarithm is -inf (with a larger
batch a single close pair hides it). Backward is 1 / 0 times the underflowed 0.
Source: https://github.com/ssnl/align_uniform/issues/10 ("I get -inf values for uniform loss when the batch size is small"); uniform_loss of
https://github.com/ssnl/align_uniform
Heals: logsumexp minus log(count), normalising the features, a floor under the mean or under the exponent. Does not: a larger t, an epsilon inside pdist, gradient clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("stable_function", "clamp_exponent", "clamp_input", "fix_upstream"),
    variable=(None,),
    line=("return torch.pdist(x, p=2).pow(2).mul(-t).exp().mean().log()",),
)


def align_loss(x, y, alpha=2):
    return (x - y).norm(p=2, dim=1).pow(alpha).mean()


def uniform_loss(x, t=2):
    return torch.pdist(x, p=2).pow(2).mul(-t).exp().mean().log()


class Encoder(nn.Module):
    def __init__(self, patches=9, dim=48):
        super().__init__()
        self.patch = nn.Linear(16, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, patches + 1, dim))
        self.block = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def features(self, patches):
        h = torch.cat([self.cls.expand(len(patches), -1, -1), self.patch(patches)], 1) + self.pos
        return self.norm(self.block(h))[:, 1:].mean(dim=1)


def build():
    torch.manual_seed(8)
    model = Encoder()
    with torch.no_grad():
        model.norm.weight.fill_(12.0)  # the gain of the pretrained final norm
    image = torch.randn(4, 1, 16) * 2 + 0.3 * torch.randn(4, 9, 16)
    batch = dict(x=image + 0.05 * torch.randn(4, 9, 16), y=image + 0.05 * torch.randn(4, 9, 16))
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        x, y = s.model.features(torch.cat([s.batch["x"], s.batch["y"]])).chunk(2)
        loss = align_loss(x, y) + (uniform_loss(x) + uniform_loss(y)) / 2
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())

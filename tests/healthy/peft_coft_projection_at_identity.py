"""peft tuners/oft, constrained OFT - the projection divides by the distance from the identity, which is 0 before the first update.

`_project_batch` computes eps * diff / norm_diff for every block and takes the untouched block with torch.where if it lies inside the ball. At
the start diff and norm_diff are 0 and the other branch is NaN, but it is not taken, and all of it runs under no_grad on the data.
Source: https://github.com/huggingface/peft/blob/main/src/peft/tuners/oft/layer.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class OFTLinear(nn.Module):
    def __init__(self, base, r=2, coft_eps=6e-5):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.r, self.coft_eps = r, coft_eps
        block = base.in_features // r
        self.oft_r = nn.Parameter(torch.zeros(r, block, block))

    @torch.no_grad()
    def project_batch(self):
        eps = self.coft_eps / self.oft_r.shape[0] ** 0.5
        origin = torch.zeros_like(self.oft_r)
        diff = self.oft_r - origin
        norm_diff = torch.norm(diff, dim=(1, 2), keepdim=True)
        inside = (norm_diff <= eps).bool()
        return torch.where(inside, self.oft_r, origin + eps * (diff / norm_diff))

    def cayley_batch(self):
        skew = 0.5 * (self.oft_r - self.oft_r.transpose(1, 2))
        identity = torch.eye(skew.shape[1]).expand_as(skew)
        return torch.linalg.solve(identity + skew, identity - skew, left=False)

    def forward(self, x):
        self.oft_r.data.copy_(self.project_batch())
        rotation = torch.block_diag(*self.cayley_batch())
        return F.linear(x, self.base.weight @ rotation, self.base.bias)


class Classifier(nn.Module):
    def __init__(self, vocab=40, dim=8, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.query = OFTLinear(nn.Linear(dim, dim))
        self.score = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.score(torch.tanh(self.query(self.embed(ids))).mean(1))


def build():
    torch.manual_seed(23)
    model = Classifier()
    ids = torch.randint(0, 40, (6, 5))
    labels = torch.randint(0, 4, (6,))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return SimpleNamespace(model=model, ids=ids, labels=labels, optimizer=optimizer)


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = F.cross_entropy(s.model(s.ids), s.labels)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss

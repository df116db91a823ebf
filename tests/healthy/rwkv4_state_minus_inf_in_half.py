"""RWKV-4 in half: the running maximum of the wkv state starts at -1e30, which half stores as -inf.

The first time step computes exp(-inf - p) = 0 for the empty state, as it should: numerator and denominator hold only the current token,
the maximum takes the finite side, and every gradient is finite. The same code in float32 gives the same loss.

https://github.com/BlinkDL/ChatRWKV (src/model_run.py, `state[5*i+4] = -1e30`)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class TimeMix(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.time_decay = nn.Parameter(torch.linspace(-3, 1, dim))
        self.time_first = nn.Parameter(torch.full((dim,), 0.3))
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def init_state(self, batch, like):
        aa = torch.zeros(batch, like.size(-1)).to(like.dtype)
        bb = torch.zeros(batch, like.size(-1)).to(like.dtype)
        pp = (torch.zeros(batch, like.size(-1)) - 1e30).to(like.dtype)
        return aa, bb, pp

    def forward(self, x):
        k, v, r = self.key(x), self.value(x), torch.sigmoid(self.receptance(x))
        aa, bb, pp = self.init_state(x.size(0), x)
        decay = -torch.exp(self.time_decay)
        out = []
        for t in range(x.size(1)):
            kk, vv = k[:, t], v[:, t]
            ww = self.time_first + kk
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            out.append((e1 * aa + e2 * vv) / (e1 * bb + e2))
            ww = pp + decay
            p = torch.maximum(ww, kk)
            e1, e2 = torch.exp(ww - p), torch.exp(kk - p)
            aa, bb, pp = e1 * aa + e2 * vv, e1 * bb + e2, p
        return self.output(r * torch.stack(out, 1))


class RWKV(nn.Module):
    def __init__(self, vocab=20, dim=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.att = TimeMix(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.emb(idx)
        return self.head(x + self.att(x))


def build():
    torch.manual_seed(4)
    model = RWKV().half()
    idx = torch.randint(0, 20, (3, 13))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, idx=idx)


def run(s=None):
    s = s or build()
    logits = s.model(s.idx[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), s.idx[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""ALiBi slopes plus masked_fill on a tril buffer, in bfloat16 autocast; the softmax is computed in float32."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the first query may look at one key only, every other score in its row is -inf"


class Alibi(nn.Module):
    def __init__(self, d=16, heads=4, max_len=12):
        super().__init__()
        self.h = heads
        self.proj = nn.Linear(d, 3 * d, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(max_len, max_len, dtype=torch.bool)), persistent=False)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1).float())

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.proj(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        pos = torch.arange(t)
        att = q @ k.transpose(-2, -1) / (d // self.h) ** 0.5
        att = att + self.slopes.view(-1, 1, 1) * (pos[None, :] - pos[:, None])
        att = att.masked_fill(self.tril[:t, :t].logical_not(), float("-inf"))
        p = att.float().softmax(-1).to(v.dtype)
        return x + (p @ v).transpose(1, 2).reshape(b, t, d)


def build():
    torch.manual_seed(204)
    net = nn.Sequential(nn.Embedding(20, 16), Alibi(), Alibi(), nn.Linear(16, 20))
    return SimpleNamespace(net=net, optim=torch.optim.AdamW(net.parameters(), lr=1e-3), ids=torch.randint(0, 20, (2, 9)))


def run(s=None):
    s = s or build()
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = s.net(s.ids[:, :-1])
        loss = nn.functional.cross_entropy(out.float().view(-1, 20), s.ids[:, 1:].reshape(-1))
        s.optim.zero_grad()
        loss.backward()
        s.optim.step()
    return loss

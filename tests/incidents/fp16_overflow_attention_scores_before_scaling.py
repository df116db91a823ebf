"""Half-precision attention multiplies queries and keys first and scales afterwards; one outlier pair passes 65504 and
its softmax row is NaN.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("bmm", "matmul"),
    index=(1, 3, 3),
    masked=None,
    role=("attention", "logits", "hidden"),
    fix=("upcast_fp32", "clamp_input", "stable_function"),
    variable=("raw",),
    line=("raw = torch.bmm(self.wq(x), self.wk(x).transpose(1, 2))",),
)


class SingleHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.temper = width**0.5

    def forward(self, x):
        raw = torch.bmm(self.wq(x), self.wk(x).transpose(1, 2))
        return torch.bmm((raw / self.temper).softmax(-1), self.wv(x))


class Block(nn.Module):
    def __init__(self, vocab=18, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.attn = SingleHead(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.attn(x))


def build():
    torch.manual_seed(111)
    model = Block()
    with torch.no_grad():
        model.embed.weight[5, 4] = 60.0  # a massive activation on one token id
        for w in (model.attn.wq.weight, model.attn.wk.weight):
            w[9, 4] = 7.0
    model.half()
    ids = torch.randint(6, 18, (3, 8))
    ids[1, 3] = 5
    adv = torch.tensor([0.4, -0.1, -0.3], dtype=torch.float16)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=(ids, adv))


def run(s=None):
    s = s or build()
    ids, adv = s.batch
    logits = s.model(ids[:, :-1])
    lp = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    loss = -(adv[:, None].float() * lp).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

"""Healthy. The tanh form of GELU in half precision: activations of +-60 overflow x ** 3 to +-inf, tanh takes that to exactly +-1, and its
derivative there is exactly 0 while the derivative of the cube stays finite. Values and gradients are those of the exact function.
Style of karpathy/minGPT (mingpt/model.py, NewGELU), in the feed-forward block of a GPT. Weights and gradients end finite.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    def __init__(self, n_embd=16):
        super().__init__()
        self.ln = nn.LayerNorm(n_embd)
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(n_embd, 4 * n_embd), c_proj=nn.Linear(4 * n_embd, n_embd), act=NewGELU()))

    def forward(self, x):
        m = self.mlp
        return x + m.c_proj(m.act(m.c_fc(self.ln(x))))


class GPT(nn.Module):
    def __init__(self, vocab=20, n_embd=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.h = nn.ModuleList([Block(n_embd), Block(n_embd)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def build():
    torch.manual_seed(1606)
    model = GPT()
    with torch.no_grad():
        fc = model.h[0].mlp["c_fc"]
        fc.bias[5], fc.bias[11] = 60.0, -60.0  # two outlier channels
        model.h[0].mlp["c_proj"].weight[:, 5] *= 0.2
    model.half()
    ids = torch.randint(0, 20, (3, 9))
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), batch=ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.batch[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), s.batch[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

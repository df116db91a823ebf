"""RWKV-v2 time mixing run in half precision. exp(k) is protected by a clamp at 60, which was chosen for fp32: in half exp overflows beyond
11.09, and the weighted average wkv / wk becomes inf / inf for every later token of that channel.

https://github.com/BlinkDL/RWKV-LM/blob/main/RWKV-v2-RNN/src/model.py (RWKV_K_CLAMP, RWKV_K_EPS, TimeX)
Taking exp and the average in fp32 heals. A larger RWKV_K_EPS, or upcasting only the division, does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow", "exp_overflow"),
    op=("exp",),
    index=(1, 3, 2),
    masked=None,
    role=("hidden", "attention"),
    fix=("upcast_fp32", "clamp_exponent", "stable_function"),
    variable=("k",),
    line=("k = torch.exp(k)",),
)

RWKV_K_CLAMP = 60
RWKV_K_EPS = 1e-8


def time_x(w, k, eps):
    T = k.size(-1)
    windows = F.pad(k, (T - 1, 0)).unfold(-1, T, 1)
    return (windows * w.unsqueeze(1)).sum(-1) + eps


class RWKV_TimeMix(nn.Module):
    def __init__(self, n_embd=8, ctx_len=6):
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.time_mix = nn.Parameter(torch.full((1, 1, n_embd), 0.5))
        self.time_decay = nn.Parameter(torch.linspace(-5, 1, n_embd).unsqueeze(-1))
        self.time_first = nn.Parameter(torch.full((n_embd, 1), -1.2))
        self.register_buffer("time_curve", torch.tensor([-(ctx_len - 2 - i) for i in range(ctx_len - 1)], dtype=torch.float).unsqueeze(0))
        self.key = nn.Linear(n_embd, n_embd, bias=False)
        self.value = nn.Linear(n_embd, n_embd, bias=False)
        self.receptance = nn.Linear(n_embd, n_embd, bias=False)
        self.output = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        x = x * self.time_mix + self.time_shift(x) * (1 - self.time_mix)
        k = self.key(x).transpose(-1, -2)
        v = self.value(x).transpose(-1, -2)
        r = self.receptance(x)

        k = torch.clamp(k, max=RWKV_K_CLAMP)
        k = torch.exp(k)
        kv = k * v

        w = torch.exp(torch.cat([torch.exp(self.time_decay) * self.time_curve, self.time_first], dim=-1))
        wkv = time_x(w, kv, 0)
        wk = time_x(w, k, RWKV_K_EPS)
        rwkv = torch.sigmoid(r) * (wkv / wk).transpose(-1, -2)
        return self.output(rwkv)


class Model(nn.Module):
    def __init__(self, vocab=12, n_embd=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, n_embd)
        self.ln = nn.LayerNorm(n_embd)
        self.att = RWKV_TimeMix(n_embd)
        self.head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + self.att(self.ln(x)))


def build():
    torch.manual_seed(5)
    model = Model()
    ids = torch.tensor([[1, 4, 2, 8, 5, 3], [6, 2, 9, 4, 7, 1]])
    with torch.no_grad():  # channel 3 has learnt to lock on to token 9 after token 2
        direction = model.ln(model.emb.weight[9]) * 0.5 + model.ln(model.emb.weight[2]) * 0.5
        model.att.key.weight[3] = direction * (13.0 / direction.dot(direction))
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, targets=ids.roll(-1, 1))


def run(s=None):
    s = s or build()
    logits = s.model(s.ids).float()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), s.targets[:, :-1].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())

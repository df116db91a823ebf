"""flash-linear-attention #11 - RWKV-6 gradients are NaN: the decay was given as sigmoid(x) where the operator wants its logarithm.

The recurrence multiplies the state by exp(w) in each step. With w = sigmoid(x) in (0, 1) that factor lies between 1 and 2.7 instead of below 1, so
the state grows without bound and passes the float32 range well within 256 tokens; then inf - inf in the read-out makes the loss NaN.
Source: https://github.com/fla-org/flash-linear-attention/issues/11
Heals: the decay in log space (logsigmoid), or refusing / clamping decays above 0. Does not: clipping gradients, a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow", "exp_overflow"),
    op=("mul",),
    index=(0, 1, 2, 2),
    masked=None,
    role=("hidden", "attention"),
    fix=("fix_upstream", "clamp_input", "clamp_exponent", "validate_config", "stable_function"),
    variable=(None, "h"),
    line=("h = h * w_i[..., None] + kv_i",),
)


def naive_recurrent_rwkv6(q, k, v, w, u):
    B, H, T, K = q.shape
    h = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    scale = K**-0.5
    for i in range(T):
        q_i = q[:, :, i] * scale
        k_i, v_i = k[:, :, i], v[:, :, i]
        w_i = w[:, :, i].exp()
        kv_i = k_i[..., None] * v_i[..., None, :]
        o_i = (h + u[None, ..., None] * kv_i) * q_i[..., None]
        outs.append(o_i.sum(-2))
        h = h * w_i[..., None] + kv_i
    return torch.stack(outs, dim=2)


class TimeMix(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.rkv = nn.Linear(dim, 3 * dim, bias=False)
        self.decay = nn.Linear(dim, dim)
        self.u = nn.Parameter(torch.zeros(heads, dim // heads))
        self.out = nn.Linear(dim, dim, bias=False)

    def split(self, x):
        B, T, D = x.shape
        return x.view(B, T, self.heads, D // self.heads).transpose(1, 2)

    def forward(self, x):
        r, k, v = (self.split(t) for t in self.rkv(x).chunk(3, dim=-1))
        w = self.split(self.decay(x).sigmoid())
        o = naive_recurrent_rwkv6(r, k, v, w, self.u)
        return self.out(o.transpose(1, 2).flatten(2))


def build():
    torch.manual_seed(14)
    vocab, dim, T = 20, 8, 256
    embed = nn.Embedding(vocab, dim)
    mix = TimeMix(dim, heads=2)
    head = nn.Linear(dim, vocab)
    model = nn.ModuleList([embed, mix, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, vocab, (1, T + 1))
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids)


def run(s=None):
    s = s or build()
    embed, mix, head = s.model
    x = embed(s.ids[:, :-1])
    logits = head(x + mix(x))
    loss = F.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss

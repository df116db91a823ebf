"""entmax with a learned alpha = 1 + sigmoid(z): in bfloat16 alpha of a nearly-softmax head rounds to exactly 1.

The bisection forward survives alpha == 1 (it returns uniform weights, entmax issue 24); the gradient of alpha divides by (alpha - 1)**2 and is
0 / 0. A learned head drifts to z = -7 during fine-tuning, 1 + 0.0009 is 1 in bfloat16, and the parameter of alpha becomes NaN while
the loss is finite. Clamping alpha at 1.01 (entmax issue 10) or computing it in fp32 heals it; an eps of 1e-8 added to alpha is lost in
bfloat16 too.

Source: https://github.com/deep-spin/entmax/issues/16 and /10, /24; https://github.com/sfschouten/court-of-xai/issues/17
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "zero_denominator", "eps_underflow"),
    op=("div", "custom_backward"),
    index=(0, 1, 0, 0),
    masked=None,
    role=("grad", "attention"),
    fix=("clamp_denominator", "clamp_input", "upcast_fp32"),
    variable=("d_alpha",),
    line=("d_alpha = (dY * (Y - Y_skewed)).sum(-1, keepdim=True) / (alpha - 1) ** 2",),
)


class EntmaxBisect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, alpha, n_iter=30):
        d = X.shape[-1]
        X = X * (alpha - 1)
        max_val = X.amax(-1, keepdim=True)
        tau_lo = max_val - 1
        dm = 1 - (1 / d) ** (alpha - 1)
        for _ in range(n_iter):
            dm = dm / 2
            tau_m = tau_lo + dm
            p_m = (X - tau_m).clamp(min=0) ** (1 / (alpha - 1))
            tau_lo = torch.where(p_m.sum(-1, keepdim=True) >= 1, tau_m, tau_lo)
        Y = p_m / p_m.sum(-1, keepdim=True)
        ctx.save_for_backward(Y, alpha)
        return Y

    @staticmethod
    def backward(ctx, dY):
        Y, alpha = ctx.saved_tensors
        gppr = torch.where(Y > 0, Y ** (2 - alpha), Y.new_zeros(1))
        q = (dY * gppr).sum(-1, keepdim=True) / gppr.sum(-1, keepdim=True)
        dX = (dY - q) * gppr
        S = torch.where(Y > 0, Y * torch.log(Y.clamp(min=1e-20)), Y.new_zeros(1))
        ent = S.sum(-1, keepdim=True)
        Y_skewed = gppr / gppr.sum(-1, keepdim=True)
        d_alpha = (dY * (Y - Y_skewed)).sum(-1, keepdim=True) / (alpha - 1) ** 2
        d_alpha = d_alpha - (dY * (S - Y_skewed * ent)).sum(-1, keepdim=True) / (alpha - 1)
        return dX, d_alpha.sum((0, 2), keepdim=True), None


class SparseAttention(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.pre_alpha = nn.Parameter(torch.randn(heads))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D // self.heads)
        alpha = 1 + torch.sigmoid(self.pre_alpha)
        attn = EntmaxBisect.apply(scores.float(), alpha.float().view(1, -1, 1, 1)).to(v.dtype)
        return self.out((attn @ v).transpose(1, 2).reshape(B, T, D))


class Classifier(nn.Module):
    def __init__(self, vocab=40, dim=16, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attention = SparseAttention(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        h = self.embed(ids)
        return self.head((h + self.attention(h)).mean(1))


def build():
    torch.manual_seed(16)
    model = Classifier()
    with torch.no_grad():
        model.attention.pre_alpha[1] = -7.0  # fine-tuning has made this head as dense as softmax
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 40, (5, 8))
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, labels=torch.randint(0, 3, (5,)))


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.ids).float(), s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

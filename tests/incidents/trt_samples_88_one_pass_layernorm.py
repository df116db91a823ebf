"""Reward model with a hand-written LayerNorm Function that takes the variance as E[x^2] - E[x]^2.

Kernels like the one-pass form. One token of an answer has a large common offset in all channels (a mean of about 3000 with a spread of 0.2): the two moments
are about 9e6, where fp32 counts in steps of one, and their difference comes out below -eps. rsqrt of a negative number is NaN; the reward, the loss and all gradients follow.
Source: https://github.com/NVIDIA/trt-samples-for-hackathon-cn/issues/88 (USE_DIFF_OF_SQUARES), https://github.com/microsoft/onnxruntime/issues/21935
Heals: variance of the centred values (two passes); a floor at zero under the variance. Does not: a usual eps, clipping, masking pads.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("rsqrt",),
    index=(1, 2, 0),
    masked=False,
    role=("hidden",),
    fix=("stable_function", "clamp_input", "clamp_denominator"),
    variable=("rstd",),
    line=("rstd = torch.rsqrt(var + eps)",),
)


class FastLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        mean_sq = (x * x).mean(-1, keepdim=True)
        var = mean_sq - mean * mean
        rstd = torch.rsqrt(var + eps)
        x_hat = (x - mean) * rstd
        ctx.save_for_backward(x_hat, rstd, weight)
        return x_hat * weight + bias

    @staticmethod
    def backward(ctx, dy):
        x_hat, rstd, weight = ctx.saved_tensors
        wdy = dy * weight
        c1 = (x_hat * wdy).mean(-1, keepdim=True)
        c2 = wdy.mean(-1, keepdim=True)
        dx = (wdy - c2 - x_hat * c1) * rstd
        flat = tuple(range(dy.dim() - 1))
        return dx, (dy * x_hat).sum(flat), dy.sum(flat), None


class RewardModel(nn.Module):
    def __init__(self, vocab=18, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, ids, mask):
        h = FastLayerNorm.apply(self.embed(ids), self.weight, self.bias, 1e-5)
        values = self.score(h).squeeze(-1)
        return (values * mask).sum(-1) / mask.sum(-1)


def build():
    torch.manual_seed(41)
    model = RewardModel()
    with torch.no_grad():
        model.embed.weight[11] = 3000.0 + 0.2 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2, 3, 4, 0], [5, 6, 11, 7, 8], [9, 10, 12, 0, 0], [13, 14, 15, 16, 17]])
    mask = (ids != 0).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": ids, "mask": mask})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        rewards = s.model(s.batch["input_ids"], s.batch["mask"])
        chosen, rejected = rewards[0::2], rewards[1::2]
        loss = -F.logsigmoid(chosen - rejected).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())

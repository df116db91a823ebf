"""Behaviour cloning from a camera with covariance pooling (iSQRT-COV, MPN-COV): one frame of the demonstration is black.

The matrix square root of the feature covariance is a custom autograd function: it divides the covariance by its trace, runs Newton-Schulz and
multiplies the root of the trace back. The camera dropped out for one frame; convolutions without bias answer a black frame with zeros, the
covariance is the zero matrix, its trace 0, and 0/0 fills the matrix of that sample with NaN.

Source: https://github.com/jiangtaoxie/fast-MPN-COV (Covpool and Sqrtm in MPNCOV.py, `A = x.div(normA...)`; the trace has no floor)
Heals: a floor under the trace; leaving black frames out of the demonstrations, or refusing them.
Does not: an eps only in the root of the trace, more or fewer Newton-Schulz iterations, gradient clipping, batch normalisation afterwards.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(2, 0, 0),
    masked=False,
    role=("hidden",),
    fix=("clamp_denominator", "drop_invalid_sample", "reject_input", "fix_upstream"),
    variable=("A",),
    line=("A = x.div(normA.view(batch, 1, 1).expand_as(x))",),
)


def newton_schulz(x, iter_n):
    batch, dim = x.shape[0], x.shape[1]
    eye = torch.eye(dim, dtype=x.dtype).expand(batch, dim, dim)
    normA = x.diagonal(dim1=1, dim2=2).sum(dim=1)
    A = x.div(normA.view(batch, 1, 1).expand_as(x))
    zy = 0.5 * (3.0 * eye - A)
    Y, Z = A.bmm(zy), zy
    for _ in range(1, iter_n):
        zy = 0.5 * (3.0 * eye - Z.bmm(Y))
        Y, Z = Y.bmm(zy), zy.bmm(Z)
    return Y * torch.sqrt(normA).view(batch, 1, 1)


class Sqrtm(torch.autograd.Function):
    """Keeps only its input; the iterations are run again in backward."""

    @staticmethod
    def forward(ctx, x, iter_n):
        ctx.save_for_backward(x)
        ctx.iter_n = iter_n
        return newton_schulz(x, iter_n)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(newton_schulz(x, ctx.iter_n), x, grad_output)
        return grad, None


class CovPoolPolicy(nn.Module):
    def __init__(self, channels: int, actions: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, stride=2, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=2, bias=False)
        rows, cols = torch.triu_indices(channels, channels)
        self.register_buffer("rows", rows)
        self.register_buffer("cols", cols)
        self.head = nn.Linear(len(rows), actions)

    def forward(self, frame):
        h = F.relu(self.conv2(F.relu(self.conv1(frame)))).flatten(2)
        h = h - h.mean(dim=2, keepdim=True)
        cov = h.bmm(h.transpose(1, 2)) / h.shape[2]
        root = Sqrtm.apply(cov, 5)
        return self.head(root[:, self.rows, self.cols])


def build():
    torch.manual_seed(2)
    model = CovPoolPolicy(6, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    frame = torch.rand(5, 3, 24, 24)
    frame[2] = 0.0
    batch = {"frame": frame, "action": torch.randn(5, 4)}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = F.mse_loss(s.model(s.batch["frame"]), s.batch["action"])
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

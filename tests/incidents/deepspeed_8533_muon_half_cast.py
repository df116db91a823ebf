"""Muon under a static loss scale casts the still scaled gradient to half before normalising it; entries above 65504 become inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("fp16_overflow",),
    op=("_to_copy", "to", "copy_"),
    index=(1, 7),
    masked=None,
    role=("optimizer", "grad"),
    fix=("upcast_fp32",),
    variable=("x",),
    line=("x = matrix.to(torch.float16)",),
)


def zeropower(matrix, rounds=4, eps=1e-5):
    x = matrix.to(torch.float16)
    x = x / (x.norm() + eps)
    for _ in range(rounds):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.float()


class ScaledMuon(torch.optim.Optimizer):
    """Orthogonal updates do not depend on the scale of the gradient, so it is not divided by the loss scale."""

    def __init__(self, params, lr=2e-3, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.add_(zeropower(buffer), alpha=-group["lr"])


class RewardHead(nn.Module):
    def __init__(self, width=9):
        super().__init__()
        self.proj = nn.Linear(width, 6, bias=False)
        self.out = nn.Linear(6, 2, bias=False).requires_grad_(False)

    def forward(self, hidden):
        return self.out(torch.tanh(self.proj(hidden)))


def build():
    torch.manual_seed(8533)
    model = RewardHead()
    hidden = 0.3 * torch.randn(8, 9)
    hidden[:, 7] = 4.5 * hidden[:, 7].sign()  # massive activation of one channel
    batch = {"hidden": hidden, "choice": (hidden[:, 7] > 0).long()}
    return SimpleNamespace(model=model, optimizer=ScaledMuon([model.proj.weight]), batch=batch, loss_scale=2.0**17)


def run(s=None):
    s = s or build()
    loss = nn.functional.cross_entropy(s.model(s.batch["hidden"]), s.batch["choice"])
    (loss * s.loss_scale).backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss

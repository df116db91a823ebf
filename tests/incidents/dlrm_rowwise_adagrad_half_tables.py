"""DLRM's row-wise sparse Adagrad on embedding tables in float16, the accumulator kept in the dtype of the table.

Row-wise Adagrad keeps one number per row, the mean of the squared gradients. A rarely clicked item gets gradients of a few 1e-5 under the mean over
the batch: they fit in float16, their squares do not (below 6e-8 is 0), and the default eps of 1e-10 is 0 in float16 as well. Gradient / 0 = inf.
Loss and gradients are finite; the row of the item is inf after the step.

Source: https://github.com/facebookresearch/dlrm/blob/main/optim/rwsadagrad.py (RWSAdagrad; there the accumulator is float32)
Heals: squares and accumulator in float32; an eps that float16 can hold (1e-5); a floor under the root.
Does not: clipping the gradient norm (it is small), a smaller learning rate (inf stays inf), skipping steps with a non-finite loss.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_denominator"),
    op=("div",),
    index=(3, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator", "avoid_singular_op"),
    variable=("step",),
    line=("step = values / std[:, None]",),
)


class RowWiseAdagrad(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, eps=1e-10):
        super().__init__(params, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros(p.shape[0], dtype=p.dtype)
                rows = torch.nonzero(p.grad.abs().sum(dim=1))[:, 0]
                values = p.grad[rows]
                state["momentum"][rows] += values.pow(2).mean(dim=1)
                std = state["momentum"][rows].sqrt().add(group["eps"])
                step = values / std[:, None]
                p[rows] = p[rows] - group["lr"] * step


class ClickModel(nn.Module):
    def __init__(self, items: int, dim: int):
        super().__init__()
        self.table = nn.Embedding(items, dim).half()
        nn.init.uniform_(self.table.weight, -0.1, 0.1)
        self.top = nn.Linear(dim, 1)

    def forward(self, item, price):
        return self.top(self.table(item).float()).squeeze(-1) * price


def build():
    torch.manual_seed(5)
    model = ClickModel(12, 8)
    optimizer = SimpleNamespace(
        sparse=RowWiseAdagrad([model.table.weight], lr=1e-2),
        dense=torch.optim.SGD(model.top.parameters(), lr=1e-2),
    )
    item = torch.tensor([0] * 150 + [1] * 120 + [2] * 100 + [6] * 130 + [4, 9])
    price = torch.where(item == 4, 0.03, torch.where(item == 9, 0.02, 3.0))
    batch = {"item": item, "price": price, "click": (torch.arange(len(item)) % 7 == 0).float()}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.model.zero_grad()
        logit = s.model(s.batch["item"], s.batch["price"])
        loss = F.binary_cross_entropy_with_logits(logit, s.batch["click"])
        loss.backward()
        s.optimizer.sparse.step()
        s.optimizer.dense.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())

"""A checkpointed block writes softplus as where(x > 30, x, log(1 + exp(x))); exp overflows in the unused branch and backward gives NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap",),
    op=("exp",),
    index=(1, 3, 5),
    masked=True,
    role=("hidden",),
    fix=("clamp_exponent", "mask_before_op", "stable_function", "clamp_input", "where_on_detached"),
    variable=("grown",),
    line=("grown = torch.exp(step)",),
)


class SoftStep(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.pre = nn.Linear(width, width)
        self.post = nn.Linear(width, width, bias=False)

    def forward(self, h):
        step = self.pre(h)
        grown = torch.exp(step)
        step = torch.where(step > 30.0, step, torch.log(1.0 + grown))
        return h + 0.1 * self.post(step)


class RewardModel(nn.Module):
    def __init__(self, vocab=19, width=8):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(SoftStep(width) for _ in range(3))
        self.score = nn.Linear(width, 1)

    def forward(self, ids):
        h = self.tok(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.score(h.mean(1)).squeeze(-1)


def build():
    torch.manual_seed(334)
    model = RewardModel()
    ids = torch.randint(0, 18, (4, 6))
    ids[1, 3] = 18  # a special token whose embedding has drifted
    with torch.no_grad():
        model.tok.weight[18] = 100.0 * nn.functional.normalize(model.blocks[1].pre.weight[5], dim=0) * 2.0
        for block in (model.blocks[0], model.blocks[2]):
            block.pre.weight.mul_(0.05)
    batch = {"ids": ids, "label": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    score = s.model(s.batch["ids"])
    loss = nn.functional.binary_cross_entropy_with_logits(score, s.batch["label"])
    loss.backward()
    s.optimizer.step()
    return loss

"""A sample that needs a suppressed token has infinite loss; its sample weight is 0, and inf * 0 makes the weighted loss NaN.
https://github.com/bigscience-workshop/metadata/pull/193
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef", "inf_times_zero_mask"),
    op=("nll_loss_forward", "mul"),
    index=(8,),
    masked=None,  # a sample weight of 0 is a mask to some and a coefficient to others
    role=("loss",),
    fix=("finite_mask_fill", "mask_before_op"),
    variable=("loss", None),
    line=(
        'loss = F.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1), reduction="none")',
        "return (loss * weight).sum() / weight.sum()",
    ),
)


class Model(nn.Module):
    def __init__(self, vocab=12, dim=6, suppressed=(10, 11)):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)
        bias = torch.zeros(vocab)
        bias[list(suppressed)] = float("-inf")
        self.register_buffer("logits_bias", bias)

    def forward(self, ids):
        return self.head(self.embed(ids)) + self.logits_bias


def loss_fn(model, batch):
    logits = model(batch["input_ids"])
    shift_logits = logits[:, :-1].contiguous()
    shift_labels = batch["labels"][:, 1:].contiguous()
    loss = F.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1), reduction="none")
    weight = batch["sample_weight"].repeat_interleave(shift_labels.size(1))
    return (loss * weight).sum() / weight.sum()


def build():
    torch.manual_seed(193)
    model = Model()
    ids = torch.randint(0, 10, (4, 6))
    ids[1, 4] = 11  # a metadata marker in the sample that the curriculum switched off
    batch = {"input_ids": ids, "labels": ids.clone(), "sample_weight": torch.tensor([1.0, 0.0, 0.5, 2.0])}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    loss = loss_fn(s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss

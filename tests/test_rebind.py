"""A mask fills a variable, for all that reads it by its name from there on; where that is not certain, the operand alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nanscope
from nanscope.report.diff import written_fix


def k3_of(diff: Tensor, mask: Tensor) -> Tensor:
    kl = diff.exp() - diff - 1
    return (kl * mask).sum() / mask.sum()


def formula(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    kl = torch.exp(diff) - diff - 1
    return (kl * mask).sum() / mask.sum()


def argument(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    return k3_of(ref - log_probs, mask)


def read_before(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    square = (diff.clamp(-1, 1) ** 2).mean()
    kl = torch.exp(diff) - 1
    return (kl * mask).sum() / mask.sum() + square


def read_later(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    kl = torch.exp(diff) - 1
    pull = (diff * mask).mean()
    return (kl * mask).sum() / mask.sum() + pull


def counts_later(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    kl = torch.exp(diff) - 1
    return (kl * mask).sum() / mask.sum() + diff.clamp(-1, 1).mean()


def over_lines(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    kl = torch.add(
        torch.exp(diff),
        -1,
    )
    return (kl * mask).sum() / mask.sum()


def of_each(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    kl = torch.stack([torch.exp(diff) * keep for diff, keep in zip(ref - log_probs, mask, strict=True)])
    return kl.sum() / mask.sum()


def again(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    total = torch.zeros(())
    for weight in (1.0, 2.0):
        scaled = diff * weight
        kl = torch.exp(diff)
        total = total + (kl * mask).sum() + (scaled * mask).mean()
    return total


def handed_on(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    kl = torch.exp(diff) - 1
    return (kl * mask).sum() / mask.sum() + k3_of(diff.clamp(-1, 1), mask)


def from_outside(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs

    def kl() -> Tensor:
        return torch.exp(diff) - 1

    return (kl() * mask).sum() / mask.sum()


def narrowed(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    keep = mask
    mask = mask * torch.tensor([[1.0], [1.0], [0.0]])
    kl = torch.exp(diff) - diff - 1
    return (kl * keep).sum() / keep.sum() + (log_probs * mask).mean()


def named_later(log_probs: Tensor, ref: Tensor, keep: Tensor) -> Tensor:
    diff = ref - log_probs
    kl = torch.exp(diff) - diff - 1
    weight = mask = keep
    return (kl * mask).sum() / weight.sum()


def named_in_a_loop(log_probs: Tensor, ref: Tensor, keep: Tensor) -> Tensor:
    diff = ref - log_probs
    kl = torch.exp(diff) - diff - 1
    for mask in (keep,):
        kl = kl * mask
    return kl.sum()


def with_a_docstring(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs

    def kl() -> Tensor:
        """As in
        diff = ref - log_probs
        """
        return torch.exp(diff) - diff - 1

    return (kl() * mask).sum() / mask.sum()


short = lambda diff: torch.exp(diff) - diff - 1  # noqa: E731


def by_a_lambda(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    return (short(diff) * mask).sum() / mask.sum()


def read_above_again(log_probs: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    diff = ref - log_probs
    total, kl = torch.zeros(()), torch.zeros(())
    for turn in range(2):
        total = total + (diff.clamp(-1, 1) ** 2).mean()
        if turn == 0:
            kl = torch.exp(diff) - 1
    return (kl * mask).sum() / mask.sum() + total


FILLED = "diff = diff.masked_fill(mask == 0, 0.0)"
CASES: list[tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str | None]] = [
    (formula, FILLED),
    (argument, FILLED),
    (read_before, FILLED),
    (read_later, FILLED),
    (over_lines, None),
    (counts_later, "kl = torch.exp(diff.masked_fill(mask == 0, 0.0)) - 1"),
    (again, "kl = torch.exp(diff.masked_fill(mask == 0, 0.0))"),
    (of_each, None),
    (handed_on, FILLED),
    (from_outside, None),
    (narrowed, "diff = diff.masked_fill(keep == 0, 0.0)"),
    (named_later, None),
    (named_in_a_loop, None),
    (with_a_docstring, None),
    (by_a_lambda, None),
    (read_above_again, "kl = torch.exp(diff.masked_fill(mask == 0, 0.0)) - 1"),
]


@pytest.mark.parametrize(("loss", "added"), CASES, ids=[loss.__name__ for loss, _ in CASES])
def test_the_name_is_bound_anew_where_it_is_certain_who_reads_it(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], added: str | None, tmp_path: Path
) -> None:
    """The line stands before the statement; where a name is not the function's own, or a healthy token would change, the operand is filled.

    added: the line, None where any change but the line would do, and the line would not.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6)
    mask = torch.ones(3, 6)
    mask[1, 4:] = 0
    ref = torch.zeros(3, 6)
    ref[1, 5] = 100.0
    with nanscope.watch(model, out=tmp_path) as scope:
        loss(model(torch.ones(3, 4)), ref, mask).backward()
    (incident,) = scope.verdict.incidents
    mask_fix = next(fix for fix in incident.fixes if fix.id == "mask_before_op")
    assert mask_fix.proven
    found = {line.strip() for diff in mask_fix.diffs for line in diff.added}
    if added is None:
        assert FILLED not in found, found
    else:
        assert added in found, (found, written_fix(incident))

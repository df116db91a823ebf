"""Which row and token of the batch an element is whose tensor is a piece of it, or lies otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recorded import record
from torch import Tensor, nn

import nanscope
from nanscope.locate.layout import Layout, layout_of
from nanscope.locate.piece import row_and_token

B, T = 4, 6
ROW, TOKEN = 1, 5


def split(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    parts = zip(lp.split(2, 1), old.split(2, 1), mask.split(2, 1), strict=True)
    return torch.stack([(torch.exp(own - before) * counts).sum() for own, before, counts in parts]).sum()


def chunks_of_rows(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    parts = zip(lp.chunk(2), old.chunk(2), mask.bool().chunk(2), strict=True)
    return torch.stack([torch.exp(own - before)[counts].sum() for own, before, counts in parts]).sum()


def slices(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    loss = lp.new_zeros(())
    for start in range(0, T, 3):
        piece = slice(start, start + 3)
        loss = loss + (torch.exp(lp[:, piece] - old[:, piece]) * mask[:, piece]).sum()
    return loss


def row_by_row(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([(torch.exp(lp[row] - old[row]) * mask[row]).sum() for row in range(B)]).sum()


def reversed_in_time(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp((lp - old).flip(1)).flip(1) * mask).sum()


def time_major(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp(lp.t() - old.t()) * mask.t()).sum()


def put_together(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.cat([torch.exp(own - before) for own, before in zip(lp.split(4, 1), old.split(4, 1), strict=True)], 1)
    return (ratio * mask).sum()


def in_one_line(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp(lp.flatten() - old.flatten()) * mask.flatten()).sum()


def as_it_lies(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp(lp - old) * mask).sum()


def shifted(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp(lp[:, 1:] - old[:, 1:]) * mask[:, 1:]).sum()


def pieces_of_what_was_computed(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([torch.exp(part) for part in (lp - old).split(2)]).sum() + mask.sum()


def rows_in_another_order(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.exp((lp - old)[torch.tensor([3, 1, 0, 2]).flip(0)]).sum() + mask.sum()


def rows_by_a_mask(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.exp((lp - old)[torch.tensor([False, True, False, True])]).sum() + mask.sum()


def put_together_otherwise(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.exp(torch.stack([*(lp - old).unbind(0)][::-1])).sum() + mask.sum()


def in_a_pile(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([torch.exp(part).sum() for part in (lp - old).view(2, 2, T).unbind(0)]).sum() + mask.sum()


def a_mini_batch(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.exp(lp - old[torch.tensor([0, 1, 2, 3])]).sum() + mask.sum()


def made_in_parts(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    order = torch.tensor([1, 3, 0, 2])
    return torch.exp(torch.cat([part - 0.0 for part in lp.split(2)])[order] - old[order]).sum() + mask.sum()


def turned_and_never_masked(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return torch.exp((lp - old).flip(1)).flip(1).sum() + mask.sum()


PLACES: list[tuple[Callable[..., Tensor], tuple[int, ...] | None]] = [
    *(
        (loss, (ROW, TOKEN))
        for loss in (split, chunks_of_rows, slices, row_by_row, reversed_in_time, time_major, put_together, in_one_line)
    ),
    *((loss, (ROW, TOKEN)) for loss in (pieces_of_what_was_computed, rows_in_another_order, rows_by_a_mask, put_together_otherwise)),
    *((loss, (ROW, TOKEN)) for loss in (in_a_pile, turned_and_never_masked, made_in_parts)),
    (as_it_lies, None),
    (shifted, None),  # the batch begins there
    (a_mini_batch, None),  # what the policy was given is the batch
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("loss", "place"), PLACES, ids=lambda value: value.__name__ if callable(value) else None)
def test_a_piece_of_a_batch_is_told_by_the_mask_that_it_meets(
    loss: Callable[..., Tensor], place: tuple[int, ...] | None, masked: bool
) -> None:
    """Whether that lets the token count or not; where there is none, by what was cut."""
    lp = torch.randn(B, T, requires_grad=True)
    old, mask = lp.detach().clone(), torch.ones(B, T)
    old[ROW, TOKEN], mask[ROW, TOKEN] = -150.0, 0.0 if masked and loss is not chunks_of_rows else 1.0
    trace = record(loss, lp, old, mask).trace
    made = (out for call in trace.program.calls if call.name == "exp" for out in call.outs if out is not None)
    value = next(out for out in made if bool(trace.values[out].isinf().any()))
    flat = int(trace.values[value].flatten().isinf().nonzero()[0])
    assert row_and_token(trace, value, flat) == place
    layout, _ = layout_of(trace, value, flat)
    assert (layout is Layout.TOKENS) == (place is None)


@pytest.mark.parametrize("large", [False, True])
def test_the_log_and_the_verdict_tell_the_token_of_the_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture, large: bool) -> None:
    """And the index in the piece beside it."""
    torch.manual_seed(0)
    tokens = 2048 if large else T
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(3):
            lp = model(torch.randn(B, tokens, 3)).squeeze(-1)
            old, mask = lp.detach().clone(), torch.ones(B, tokens)
            if step == 1:
                old[ROW, tokens - 1] -= 150.0
            optimizer.zero_grad()
            parts = zip(lp.split(2, 1), old.split(2, 1), mask.split(2, 1), strict=True)
            torch.stack([(torch.exp(own - before) * counts).sum() for own, before, counts in parts]).sum().backward()
            optimizer.step()
    incident = scope.verdict.incidents[0]
    said = f"row {ROW}, token {tokens - 1:,}"
    assert (incident.origin.index, incident.origin.batch) == ((ROW, 1), (ROW, tokens - 1))
    assert said in incident.headline or (incident.sample is not None and incident.sample.place == said), incident.headline
    assert f"at {said} ([{ROW}, 1] of [{B}, 2])" in caplog.text, caplog.text

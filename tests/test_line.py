"""The line of a step: its norms as the trainer and the optimizer saw them, and what it leaves out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from loops import policy
from torch import nn

import nanscope
from nanscope.snapshot.step import Stepped
from nanscope.watching.counts import Counts
from nanscope.watching.line import Line


def test_the_norm_in_the_history_is_that_before_the_clip(tmp_path: Path) -> None:
    """Of the clip's own norm; what is left of it stands beside it, and nothing does where nothing was clipped."""
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: list[float] = []
    with nanscope.watch(out=tmp_path) as scope:
        for most in (0.01, 1e9, None):
            optimizer.zero_grad()
            (model(torch.tensor([1, 2, 3])) * 5).square().mean().backward()
            with torch.no_grad():
                sum(parameter.norm() for parameter in model.parameters())  # of the weights: no gradient's
            found.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
            if most is not None:
                nn.utils.clip_grad_norm_(model.parameters(), most)
            with torch.no_grad():
                sum(parameter.norm() for parameter in model.parameters())
            optimizer.step()
    entries = scope.history.entries
    assert [entry.grad_norm for entry in entries] == pytest.approx(found, rel=1e-5) and found[0] > 1.0
    assert [entry.grad_norm_clipped for entry in entries] == [pytest.approx(0.01, rel=1e-3), None, None]


def test_a_clip_of_each_gradient_by_itself_is_seen(tmp_path: Path) -> None:
    """Norms that a loop takes one by one make the same sum; one in another order is none of these."""
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight, bias], lr=0.0)
    with nanscope.watch(out=tmp_path) as scope:
        for order in (2.0, 1.0):
            optimizer.zero_grad()
            ((weight * 3).sum() + (bias * 4).sum()).backward()
            with torch.no_grad():
                for parameter in (weight, bias):
                    assert parameter.grad is not None
                    parameter.grad.div_(parameter.grad.norm(order))
            optimizer.step()
    first, second = scope.history.entries
    assert (first.grad_norm, first.grad_norm_clipped) == (pytest.approx(math.sqrt(34)), pytest.approx(math.sqrt(2)))
    assert (second.grad_norm, second.grad_norm_clipped) == (pytest.approx(math.sqrt(1.5)), None)


@pytest.mark.parametrize(
    ("norm", "before", "shown", "clipped"),
    [
        (1.0, 5.0, 5.0, 1.0), (5.0, 5.0, 5.0, None), (5.0, 5.0 + 1e-6, 5.0 + 1e-6, None), (3.0, None, 3.0, None), (None, 7.0, 7.0, None),
        (math.nan, math.nan, math.nan, None), (math.nan, math.inf, math.inf, math.nan), (0.0, math.inf, math.inf, 0.0), (None, None, None, None),
    ],
)  # fmt: skip
def test_the_norm_is_shown_once_unless_a_clip_changed_it(
    norm: float | None, before: float | None, shown: float | None, clipped: float | None
) -> None:
    """What was there before the clip comes first; what is left of it only where it is another number."""
    entry = Line(norm=norm, before=before).entry(Counts(()), 0, Stepped.TAKEN, False)
    assert repr((entry.grad_norm, entry.grad_norm_clipped)) == repr((shown, clipped))


def test_a_step_that_was_taken_by_the_only_optimizer_says_no_more() -> None:
    """A line stays short: what is as ever is left out."""
    counts = Counts(())
    counts.open()
    counts.begin()
    assert set(Line(loss=1.0).entry(counts, 0, Stepped.TAKEN, False).to_json()) == {"step", "rank", "time", "seconds", "loss", "nonfinite"}

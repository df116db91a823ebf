"""What other losses make of a batch, and a sweep, in a terminal: readable, bounded in width, and inert whatever a file is called."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanscope.objective.settings import LossInputs
from nanscope.replay.batch import RecordedBatch
from nanscope.replay.sweep import Point, Sweep, Trial
from nanscope.replay.under import Others, Outcome
from nanscope.replay.variants import variants
from nanscope.report.console import WIDTH
from nanscope.report.replay import SUFFIXES, draw_sweep, print_others, print_sweep
from nanscope.report.variants import print_variants

HOSTILE = "\x1b[31mname\u202e$x^2$"
GOOD, TIGHT, BAD, LOST = (
    Trial(0.5, 0, 0.0, True),
    Trial(0.5, 0, 0.25, True),
    Trial(0.5, 3, None, False),
    Trial(float("nan"), 0, None, False),
)
SWEEP = Sweep(
    operand="log_ratio", place="train.py:7", op="exp", value=200.0, largest=2.5, limit=88.72, dtype="float32",
    points=(Point(1.0, TIGHT, BAD, TIGHT, BAD), Point(3.0, GOOD, BAD, GOOD, BAD), Point(88.0, LOST, BAD, None, None)),
    key="trl.grpo, log_ratio_clamp_value", no_objective="",
)  # fmt: skip


def shown(sweep: Sweep) -> str:
    stream = io.StringIO()
    print_sweep(sweep, file=stream)
    return stream.getvalue()


def test_a_sweep_is_a_table_and_what_to_take_from_it() -> None:
    """One line a bound; the smallest good one is marked; a distortion is a share, a failure is named."""
    lines = {line.split()[0]: line for line in shown(SWEEP).splitlines() if re.match(r" +±[0-9]+  ", line)}
    assert "off by 25 %" in lines["±1"] and "← smallest" not in lines["±1"]
    assert "unchanged  ← smallest" in lines["±3"] and lines["±3"].count("gradient not finite") == 2
    assert "loss NaN" in lines["±88"]
    assert "±3 is the smallest clamp of log_ratio before exp" in " ".join(shown(SWEEP).split())
    assert "largest healthy |log_ratio| is 2.5 nat" in shown(SWEEP)


def test_a_sweep_without_a_good_bound_or_an_objective_says_so() -> None:
    """Two columns less, and why; no bound is recommended."""
    poor = replace(SWEEP, points=(Point(1.0, TIGHT, BAD),), key=None, no_objective="the batch has no mask")
    text = shown(poor)
    assert "No bound both keeps everything finite" in text and "no objective beside it: the batch has no mask" in text
    assert "smallest" not in text and "objective: before" not in text


def batch(name: str) -> RecordedBatch:
    ones = torch.ones(2, 3)
    return RecordedBatch(LossInputs(ones, ones, None, None, ones, ones), (("log_probs", name), ("mask", "mask")))


def test_a_sentence_for_every_objective_with_its_mark() -> None:
    """Survived, not survived, not run; and what the batch was read from."""
    outcomes = (
        Outcome("verl.vanilla", "", 0.5, 0, 4, 0, 2, 0.0),
        Outcome("trl.dapo", "", 0.5, 0, 4, 1, 2, 0.0),
        Outcome("verl.kl_loss", "", None, 0, 4, 0, 2, None, "this loss reads ref_log_probs, and the batch has none"),
    )
    stream = io.StringIO()
    print_others(Others(batch("logps"), outcomes), file=stream)
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert [line[:1] for line in lines if line[1:2] == " "] == ["✓", "✗", "–"]
    assert "batch [2, 3]: log_probs ← logps, mask ← mask" in lines


def test_nothing_is_wider_than_a_terminal() -> None:
    """Neither the variants with their long lists nor the table of a sweep."""
    stream = io.StringIO()
    print_variants(variants(), False, file=stream)
    print_variants(variants("verl"), True, file=stream)
    print_variants(variants("skyrl"), True, file=stream)
    print_sweep(SWEEP, file=stream)
    assert max(map(len, stream.getvalue().splitlines())) <= WIDTH


def test_names_from_a_file_are_inert(tmp_path: Path) -> None:
    """No escape sequence reaches the terminal, and a dollar sign is no formula in the picture."""
    stream = io.StringIO()
    hostile = replace(SWEEP, operand=HOSTILE, place=HOSTILE)
    print_sweep(hostile, file=stream)
    print_others(Others(batch(HOSTILE), (Outcome(HOSTILE, "", 0.5, 0, 4, 0, 2, 0.0),)), file=stream)
    assert "\x1b" not in stream.getvalue() and "\u202e" not in stream.getvalue()
    draw_sweep(hostile, tmp_path / "x.png")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_sweep_is_drawn(suffix: str, tmp_path: Path) -> None:
    """In every form that is offered."""
    path = tmp_path / f"sweep{suffix}"
    draw_sweep(SWEEP, path)
    assert path.stat().st_size > 1000

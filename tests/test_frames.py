"""Results as frames: the columns that the page documents, a row each, of numbers and text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from verdicts import ppo_step

import nanscope
from nanscope.atlas import atlas
from nanscope.audit import audit_snapshots

PAGE = (Path(__file__).parents[1] / "docs" / "frames.md").read_text(encoding="utf-8")


def own(log_probs, old_log_probs, advantages, mask):
    return -(torch.exp(log_probs - old_log_probs) * advantages[:, None] * mask).sum() / mask.sum()


FRAMES: dict[str, Callable[[], pandas.DataFrame]] = {
    "What was tried on a step": lambda: nanscope.replay(ppo_step({})).frame(),
    "The batch under other objectives": lambda: nanscope.replay_under(ppo_step({}), "verl.vanilla", own).frame(),
    "The hazards of a loss": lambda: nanscope.check(own).frame(),
    "The findings of an audit": lambda: audit_snapshots([ppo_step({})]).frame(),
    "The atlas": lambda: atlas("trl.grpo").frame(),
}


def documented(heading: str) -> list[str]:
    """The columns that the table under a heading names."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [name for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize("heading", FRAMES)
def test_a_frame_has_the_columns_that_are_documented(heading: str) -> None:
    """These and no others, in this order; and an index that is documented, too, where it has a name."""
    found = FRAMES[heading]()
    assert len(found) > 0
    assert [name for name in [found.index.name, *found.columns] if name] == documented(heading)


@pytest.mark.parametrize("heading", FRAMES)
def test_a_frame_is_of_numbers_and_text(heading: str) -> None:
    """No object of ours stands in a cell; the figures of a finding are by name."""
    found = FRAMES[heading]()
    kinds = {type(cell) for column in found.columns if column != "figures" for cell in found[column].tolist()}
    assert kinds <= {str, int, float, bool, type(None)}


def test_a_hazard_is_a_row_that_can_be_asked() -> None:
    """Worst first, with what it takes to get there, and whether its fix works."""
    check = nanscope.check(own)
    found = check.frame()
    assert list(found.severity) == [hazard.severity.name.lower() for hazard in check.hazards]
    row = found[(found.op == "exp") & (found.tensor == "old_log_probs")].iloc[0]
    assert row.code == "return -(torch.exp(log_probs - old_log_probs) * advantages[:, None] * mask).sum() / mask.sum()"
    assert Path(row.file).name == "test_frames.py" and row.line > 0 and row.fix and bool(row.works)


@pytest.mark.parametrize("empty", ["check", "replay", "others", "audit"])
def test_a_frame_of_nothing_has_its_columns(empty: str) -> None:
    """Whoever asks for a column of a result without rows gets an empty one."""
    full: Any = {
        "check": lambda: (nanscope.check(own), "hazards"),
        "replay": lambda: (nanscope.replay(ppo_step({})), "rows"),
        "others": lambda: (nanscope.replay_under(ppo_step({}), "verl.vanilla"), "outcomes"),
        "audit": lambda: (audit_snapshots([ppo_step({})]), "findings"),
    }[empty]
    result, rows = full()
    nothing = replace(result, **{rows: ()}).frame()
    assert len(nothing) == 0 and list(nothing.columns) == list(result.frame().columns)

"""Folding: text stays within its width and loses nothing, long names part at their joints, a folded command is still the command."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from nanscope.report.console import in_characters, plain, table
from nanscope.report.folding import command, fold, folded

PATH = "nanscope-demo/2026-11-23T08-37-13-demo/step-000060.rank0.safetensors"
WORDS = st.text(st.sampled_from("abc_./(=≤文 -"), max_size=120)


@given(WORDS, st.integers(2, 60))
def test_folded_text_is_as_wide_as_asked_and_whole(text: str, width: int) -> None:
    """No line is wider, and nothing but blanks is lost or added, wide characters too."""
    lines = fold(text, width)
    assert all(cell_len(line.rstrip()) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_a_long_name_parts_at_its_joints() -> None:
    """A path behind a slash, code behind a bracket or an underscore; a word that has room on its own line stays whole."""
    assert fold(PATH, 40) == ["nanscope-demo/2026-11-23T08-37-13-demo/", "step-000060.rank0.safetensors"]
    assert fold("kl = torch.exp(ref_log_ratio) - 1", 24) == ["kl =", "torch.exp(ref_log_ratio)", "- 1"]
    assert fold("torch.exp(ref_log_ratio)", 16) == ["torch.exp(ref_", "log_ratio)"]


def test_what_goes_on_is_indented_like_its_beginning() -> None:
    """The second line of an indented one stands under the first."""
    assert fold("  fix: clamp log_ratio before exp", 20) == ["  fix: clamp", "  log_ratio before", "  exp"]


def test_styles_stay_with_their_words() -> None:
    """A word that is red is red on its next line."""
    text = Text.assemble("the ", ("harmful value", "red"), " here")
    found = folded(text, 11)
    assert found.plain.split("\n") == ["the harmful", "value here"]
    assert [found.plain[span.start : span.end] for span in found.spans] == ["harmful", "value"]


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("ab/_.-'\" ;$x"), min_size=1, max_size=70), min_size=1, max_size=4), st.integers(16, 90))
def test_a_folded_command_is_read_as_the_command(words: list[str], width: int) -> None:
    """What a shell makes of the lines is what it makes of the one line."""
    lines = command(shlex.join(["nanscope", *words]), width, 4)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == ["nanscope", *words]
    assert all(len(line) <= width for line in lines)


def test_a_shell_reads_it_so_too() -> None:
    """A real one, at the width of a telephone."""
    lines = command(f"printf %s '{PATH} x;y' {PATH}", 32, 8)
    assert len(lines) > 4
    done = subprocess.run(["sh", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{PATH} x;y{PATH}"


def test_a_substitute_that_is_longer_is_counted() -> None:
    """In ASCII a line is no wider than asked either, and its styles stand where they stood."""
    text = Text.assemble("≤ ≥ … ", ("±20", "red"))
    spelt = in_characters(text, "ascii")
    (span,) = spelt.spans
    assert spelt.plain == "<= >= ... +-20" and spelt.plain[span.start : span.end] == "+-20"
    assert max(map(len, plain(Text("≤ " * 60), 40, "ascii").splitlines())) <= 40
    assert in_characters(text, "utf-8") is text


def test_a_table_puts_one_column_under_its_rows_before_it_becomes_a_list() -> None:
    """Three ways to draw it, by the room there is: side by side, one column below, a block a row. No word is lost in any."""
    shown = table("replay", "what", "loss", under="what")
    shown.add_row("mask_before_op", "fill log_ratio with 0 where mask excludes it", "0.05")
    wide, middle, narrow = (plain(shown, width).splitlines() for width in (80, 36, 19))
    assert wide == [
        "replay          what                                          loss",
        "mask_before_op  fill log_ratio with 0 where mask excludes it  0.05",
    ]
    assert middle == ["replay          loss", "mask_before_op  0.05", "  fill log_ratio with 0 where mask", "  excludes it"]
    assert narrow[:2] == ["replay", "mask_before_op"] and narrow[-1] == "  loss: 0.05"


@pytest.mark.parametrize("width", [-1, 0, 1, 2])
@pytest.mark.parametrize("text", ["reading step-000005.rank0.safetensors", "日本語 and more", "é" * 9])
def test_where_there_is_no_room_a_line_is_folded_all_the_same(text: str, width: int) -> None:
    """A column of a narrow terminal may have none left: nothing is lost, and nothing raised."""
    assert "".join(fold(text, width)).replace(" ", "") == text.replace(" ", "")

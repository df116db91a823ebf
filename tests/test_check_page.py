"""The page of a check, and its other forms: everything that was found stands there, worst first, and nothing in it is markup."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pages import Page, odd
from typer.testing import CliRunner

import nanscope
from nanscope.__main__ import app
from nanscope.errors import NanscopeError
from nanscope.foresight.hazard import Check
from nanscope.foresight.pushes import Severity
from nanscope.report.check_page import MOST, RENDERERS, facts_of_check, parts_of, write_check
from nanscope.report.html import MOST_BYTES


def own(log_probs, old_log_probs, advantages, mask):
    ratio = torch_exp(log_probs - old_log_probs)
    if mask.sum() > 1:
        advantages = advantages / (advantages.std() + 1e-4)
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum()


def torch_exp(log_ratio):
    return log_ratio.exp()


@pytest.fixture(scope="module")
def found() -> Check:
    return nanscope.check(own)


def page_of(check: Check, path: Path) -> tuple[str, Page]:
    """The page as text and taken apart, inert."""
    write_check(check, path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.faults and not odd(text) and "://" not in text and len(text.encode()) < MOST_BYTES
    return text, page


def test_the_page_says_what_was_found_worst_first(found: Check, tmp_path: Path) -> None:
    """Every trigger, what it spoils, its fix, the guards, and what was settled; the source of what training reaches."""
    text, page = page_of(found, tmp_path / "hazards.html")
    for hazard in found.hazards:
        assert hazard.trigger.words in page.text and hazard.spoils.words in page.text
        assert hazard.fix is None or hazard.fix.label in page.text
    for guard in found.guards:
        assert guard.expression in page.text and guard.words in page.text
    assert found.guards and found.sentence in page.text and "if mask.sum() > 1" in page.text
    order = [text.index(f">{severity.words.capitalize()}<") for severity in Severity if any(h.severity is severity for h in found.hazards)]
    assert order == sorted(order) and order[-1] < text.index(">Guarded<") < text.index(">Settled<")
    assert text.count("<mark>log_ratio.exp()</mark>") == 1
    near = found.nearest
    assert near is not None and f"Nearest: {near.trigger.words} (test_check_page.py:" in page.text


def test_the_figures_at_the_top_are_those_of_the_check(found: Check) -> None:
    """What is silent is counted among what training reaches; a search that was cut off is in doubt."""
    facts = {fact.name: fact for fact in facts_of_check(found)}
    assert facts["reachable in training"].value == str(len(found.reachable)) and facts["reachable in training"].state == "harm"
    assert facts["guarded"].value == str(len(found.guards)) and facts["runs"].state == ""
    cut = {fact.name: fact for fact in facts_of_check(replace(found, places=9, left=3))}
    assert cut["runs"].state == "doubt" and cut["runs"].detail == "3 of 9 places left out"


def test_a_check_without_hazards_is_a_page(tmp_path: Path) -> None:
    """It says so, in the colour of what is well, unless it was cut off."""
    text, _ = page_of(Check((), 4, 12), tmp_path / "none.html")
    assert 'class="verdict proven">No hazard found in 12 runs of the step.' in text and "<section>" not in text
    text, _ = page_of(Check((), 4, 2000, places=8, left=2), tmp_path / "cut.html")
    assert 'class="verdict doubt"' in text and "Not complete" in text


def test_hostile_strings_stay_text_and_many_lines_are_cut(found: Check, tmp_path: Path) -> None:
    """Names and sources come from a file."""
    hazard = found.reachable[0]
    nasty = "<script>alert(1)</script>\x1b[2J\u202e"
    origin = replace(hazard.origin, expression=nasty, file=nasty, source=((hazard.origin.line or 1, nasty),))
    bad = replace(hazard, trigger=replace(hazard.trigger, words=nasty), origin=origin, others=(nasty,))
    many = tuple(replace(hazard, origin=replace(hazard.origin, line=line, source=((line, f"line {line}"),))) for line in range(1, 4 * MOST))
    hostile = replace(found, hazards=(bad, *many), fixed=(f"`{nasty}`",), healed=(nasty,))
    text, page = page_of(hostile, tmp_path / "hostile.html")
    assert "<script" not in text and "alert(1)" in page.text
    assert len(parts_of(hostile)[0].lines) == MOST and parts_of(hostile)[0].more == 4 * MOST - MOST and "more lines" in text


def test_every_form_is_written_by_its_suffix(found: Check, tmp_path: Path) -> None:
    """And another one is refused with those that there are."""
    for suffix in RENDERERS:
        write_check(found, tmp_path / f"hazards{suffix}")
    assert json.loads((tmp_path / "hazards.json").read_text(encoding="utf-8"))["runs"] == found.runs
    assert json.loads((tmp_path / "hazards.sarif").read_text(encoding="utf-8"))["version"] == "2.1.0"
    assert found.sentence in (tmp_path / "hazards.txt").read_text(encoding="utf-8")
    with pytest.raises(NanscopeError) as error:
        write_check(found, tmp_path / "hazards.docx")
    assert error.value.slug == "unknown-format"


def test_the_command_line_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the status of the check, and only the name of the file."""
    (tmp_path / "losses.py").write_text("def mine(log_probs, mask):\n    return -(log_probs * mask).sum() / mask.sum()\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "losses:mine", "-o", "hazards.html"])
    assert done.exit_code == 3 and done.stdout.strip() == "hazards.html"
    assert "all of mask is 0" in Page((tmp_path / "hazards.html").read_text(encoding="utf-8")).text

"""A result in a notebook's cell, as a file, and in one line: for every class that a person gets to see."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import Page, odd
from recorded import leaf, record
from verdicts import incident_of, ppo_step, verdict_of

import nanscope
from nanscope.atlas import atlas
from nanscope.audit import audit_snapshots
from nanscope.errors import NanscopeError, one_line
from nanscope.foresight.precision import precision
from nanscope.replay.tries import NOTHING, replay
from nanscope.report.html import MOST_BYTES
from nanscope.report.results import FORMS, HIGHEST, LOWEST, TOLD_AS
from nanscope.shown import SHORT, Shown

HOSTILE = "x\x1b[2J</iframe><script>alert(1)</script>\u202e\n\"'>"


def own(log_probs, old_log_probs, advantages, mask):
    return -(torch.exp(log_probs - old_log_probs) * advantages[:, None] * mask).sum() / mask.sum()


@cache
def watched() -> nanscope.Scope:
    with nanscope.watch(out="nanscope-none", name="a run") as scope:
        weight = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
        (weight(torch.ones(2)) * torch.tensor(float("nan"))).sum().backward()
        optimizer.step()
    return scope


RESULTS: dict[str, Callable[[], Any]] = {
    "Verdict": lambda: verdict_of("forward masked"),
    "Verdict of a healthy run": lambda: replace(verdict_of("forward masked"), incidents=(), bad_steps=0),
    "Incident": incident_of,
    "Replay": lambda: replay(ppo_step({})),
    "Replay that stays finite": lambda: record(lambda x: x.exp().mean(), leaf(3)).replay(),
    "Replay of nothing": lambda: NOTHING,
    "Snapshot": lambda: ppo_step({}),
    "Audit": lambda: audit_snapshots([ppo_step({})]),
    "Check": lambda: nanscope.check(own),
    "Others": lambda: nanscope.replay_under(ppo_step({}), ["verl.vanilla", "trl.grpo"]),
    "Precision": lambda: precision(record(lambda x: (x * 3).exp().mean(), leaf(3)).snapshot()),
    "Atlas": lambda: atlas(["trl.grpo"]),
}


@cache
def result(kind: str) -> Any:
    return RESULTS[kind]()


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nanscope.Scope:
    monkeypatch.chdir(tmp_path)
    watched.cache_clear()
    return watched()


def page_in(cell: str) -> str:
    """The page inside the frame of a cell."""
    (page,) = re.findall(r'srcdoc="([^"]*)"', cell)
    return html.unescape(page)


def judged(shown: Any) -> str:
    """What a cell has inside, once all is well with the cell."""
    cell = shown._repr_html_()
    assert cell is not None and cell.count("<iframe ") == 1 and cell.count("allow-") == cell.count(' sandbox="allow-scripts"') == 1
    outside = re.sub(r'srcdoc="[^"]*"', "", cell)
    assert re.sub(r'[a-z-]+="[^"<>]*"', "", outside).split() == ["<div", "><iframe", "></iframe></div>"]
    height = int(re.findall(r"^<div style=\"height:(\d+)px", cell)[0])
    assert LOWEST <= height <= HIGHEST
    page = page_in(cell)
    faults = [fault for fault in Page(page).faults if not re.fullmatch(r"style width:[\d.]+%|element nav", fault)]  # bars, and a menu
    assert not faults and not odd(page) and len(page.encode()) < MOST_BYTES
    return page


@pytest.mark.parametrize("kind", RESULTS)
def test_a_cell_shows_the_page_in_a_frame_of_its_own(kind: str) -> None:
    """Inert, self-contained, of a height that can be read, and nothing of it outside the frame."""
    assert "<style>" in judged(result(kind))


@pytest.mark.parametrize("kind", RESULTS)
def test_a_repl_shows_one_short_line(kind: str) -> None:
    """At most 200 characters, of which the first are its class; str() is one line, and no line is empty."""
    shown = result(kind)
    assert repr(shown).startswith(f"<{type(shown).__name__}: ") and repr(shown).endswith(">") and len(repr(shown)) <= SHORT
    assert str(shown) and len(str(shown).splitlines()) == 1 and "tensor(" not in str(shown)
    assert str(shown)[:60] in repr(shown)


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("suffix", [".html", ".txt", ".json"])
def test_a_report_is_what_its_suffix_says(kind: str, suffix: str, tmp_path: Path) -> None:
    """A page, text, or JSON; an unknown suffix names those that are known."""
    path = tmp_path / f"report{suffix}"
    result(kind).report(path)
    text = path.read_text(encoding="utf-8")
    assert {".html": text.lower().startswith("<!doctype html>"), ".txt": "<" not in text[:1] and len(text) > 20, ".json": True}[suffix]
    if suffix == ".json":
        assert json.loads(text)
    with pytest.raises(NanscopeError, match=r"no renderer for '\.docx'; known are \.html"):
        result(kind).report(str(tmp_path / "report.docx"))
    with pytest.raises(NanscopeError, match="cannot be written"):
        result(kind).report(tmp_path / "nowhere" / f"report{suffix}")


def test_a_run_shows_its_verdict(scope: nanscope.Scope, tmp_path: Path) -> None:
    """The cell and the report of a scope are those of its verdict; its line does not wait for a diagnosis."""
    assert str(scope).startswith("1 step watched, 1 bad step saved, in nanscope-none/") and repr(scope).startswith("<Scope: 1 step")
    scope.report(tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    page = re.sub(r'(<a [^>]*?)href="#[^"]*"', r"\1", page)  # the frame has no address that these could be of
    assert page_in(scope._repr_html_() or "") == page == page_in(scope.verdict._repr_html_() or "")
    assert scope.verdict.incidents[0].phase in page
    scope.report("y.md")
    assert (tmp_path / "y.png").read_bytes().startswith(b"\x89PNG") and "y.png" in (tmp_path / "y.md").read_text(encoding="utf-8")
    scope.report("x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_replay_that_fails_is_told_as_its_incident() -> None:
    """With the table of what was tried, the best fix first."""
    page = judged(result("Replay"))
    assert "mask_before_op" in page and "✓ best" in page
    assert str(result("Replay")).startswith("step 7: exp goes wrong again; ") and "mask_before_op" in str(result("Replay"))
    assert str(NOTHING) == "nothing can be run again: there is no program of this step's loss"
    assert str(result("Replay that stays finite")) == "step 7: the replayed loss and its gradients are finite"


def test_a_snapshot_shows_what_its_tensors_hold() -> None:
    """Name, role and numbers, what is masked told apart; a bad number is loud."""
    page = judged(result("Snapshot"))
    assert "[3, 4] float32 cpu, −120 … −0.5545" in page and "11 of 12 counted" in page and "old_log_probs" in page


@pytest.mark.parametrize("kind", ["Verdict", "Incident", "Snapshot", "Audit", "Check", "Others", "Replay that stays finite"])
def test_a_hostile_name_stays_text(kind: str) -> None:
    """Nothing that a file says leaves the frame, closes it, or becomes markup in it."""
    shown = {
        "Verdict": lambda: replace(verdict_of("forward masked"), incidents=(incident_of(sentence=HOSTILE, headline=HOSTILE),)),
        "Incident": lambda: incident_of(sentence=HOSTILE, headline=HOSTILE),
        "Snapshot": lambda: hostile(ppo_step({})),
        "Audit": lambda: replace(result("Audit"), reduction=HOSTILE, findings=tuple(map(spoken, result("Audit").findings))),
        "Check": lambda: replace(result("Check"), healed=(HOSTILE,)),
        "Others": lambda: replace(
            result("Others"), outcomes=tuple(replace(one, id=HOSTILE, note=HOSTILE) for one in result("Others").outcomes)
        ),
        "Replay that stays finite": lambda: replace(
            result("Replay that stays finite"),
            rows=tuple(replace(row, label=HOSTILE) for row in result("Replay that stays finite").rows),
        ),
    }[kind]()
    page = judged(shown)
    assert "<script>alert" not in page and "alert(1)" in page
    for line in (repr(shown), str(shown)):
        assert "\x1b" not in line and "\u202e" not in line and len(line.splitlines()) == 1


def spoken(finding: Any) -> Any:
    return replace(finding, sentence=HOSTILE)


def hostile(snapshot: nanscope.Snapshot) -> nanscope.Snapshot:
    leaves = tuple(replace(one, name=HOSTILE, role=HOSTILE) for one in snapshot.program.leaves)
    return replace(snapshot, program=replace(snapshot.program, leaves=leaves), worker=HOSTILE)


def test_every_class_that_can_be_shown_is_known() -> None:
    """Whoever inherits from `Shown` has its forms; and what stands in the table is there."""
    kinds = {kind.__name__ for kind in every(Shown)}
    assert kinds == (set(FORMS) | set(TOLD_AS)) - {"FigureSheet"} == {kind.split()[0] for kind in RESULTS} | {"Scope"}


def every(kind: type[Any]) -> list[type[Any]]:
    return [one for own in kind.__subclasses__() for one in (own, *every(own)) if one.__module__.startswith("nanscope.")]


def test_a_class_that_somebody_derives_is_shown_as_its_own() -> None:
    """A user's `class Mine(nanscope.Verdict)` has the page of a verdict."""
    mine = type("Mine", (nanscope.Verdict,), {"__slots__": ()})
    assert "watched" in judged(mine((), steps=3))
    assert repr(mine((), steps=3)).startswith("<Mine: 3 steps watched")


def test_without_the_packages_that_draw_a_notebook_shows_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training image may lack jinja2: then there is no page, and no error; a report says what is missing."""
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert verdict_of("forward masked")._repr_html_() is None
    with pytest.raises(ModuleNotFoundError, match="jinja2"):
        verdict_of("forward masked").report("x.html")


def test_one_line_is_one_line() -> None:
    """Line ends become spaces, what commands a terminal is spelled out."""
    assert one_line("a\n b\tc\x1b[2J") == "a b c⟨U+001B⟩[2J"

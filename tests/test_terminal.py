"""The terminal report: every fact is there, hostile text is inert, and the width is bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from recorded import record
from test_locate import CASES

import nanscope
from nanscope.report.clean import clean
from nanscope.report.console import WIDTH, plain
from nanscope.report.terminal import incident_shown, render_text
from nanscope.snapshot.observation import Link
from nanscope.verdict.diagnose import diagnose
from nanscope.verdict.incident import Incident, Note, Verdict


def incident(name: str = "mask multiplies") -> Incident:
    case = next(case for case in CASES if case.name == name)
    return diagnose(record(case.loss, *case.args()).snapshot(), "run/step-000007.rank0.safetensors")


def test_the_report_says_everything_a_tired_stranger_needs() -> None:
    """Step, phase, sentence, line, element, numbers, mask, chain, table, next command."""
    text = render_text(Verdict((incident(),), steps=7, bad_steps=3))
    for words in (
        "step 7 · rank 0 · forward",
        "ratio = torch.exp(logps - old)",
        "test_locate.py:",
        "[1, 3] of [3, 5]",
        "masked: multiplied by mask = 0",
        "mask_before_op",
        "✓ best",
        "✗ tempting, and wrong",
        "reproduces bit for",
        "nanscope replay run/step-000007.rank0.safetensors",
        "7 steps watched, 2 more bad steps not saved",
    ):
        assert words in text, words


def test_what_is_alike_is_told_once() -> None:
    """Of the micro-batches of a step that go wrong in the same way the first is told; where another is not alike, both are."""
    one = incident()
    micro_batches = [replace(one, micro_batch=part, micro_batches=3, snapshot=f"run/part{part}.safetensors") for part in (1, 2, 3)]
    text = render_text(Verdict(tuple(micro_batches), steps=7, bad_steps=1))
    assert text.count("✓ best") == 1 and text.count("As in step 7, micro-batch 1 of 3, above") == 2
    assert all(f"nanscope replay run/part{part}.safetensors" in text for part in (1, 2, 3))
    other = replace(micro_batches[1], rows=tuple(replace(row, works=not row.works) for row in one.rows))
    assert "above" not in render_text(Verdict((micro_batches[0], other), steps=7, bad_steps=1))


def test_every_kind_of_fault_renders_within_the_width() -> None:
    """No case breaks the layout."""
    for case in CASES:
        text = render_text(Verdict((incident(case.name),), steps=1, bad_steps=1))
        assert "step 7" in text
        assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_a_healthy_run_is_one_line() -> None:
    """Good news is short."""
    assert len(render_text(Verdict((), steps=5)).splitlines()) == 1


def test_hostile_text_is_inert() -> None:
    """Escape sequences, bidi marks and markup from a file do not reach the terminal."""
    evil = "\x1b[31m\x07\u202e[bold]x[/bold]</script>"
    assert "\x1b" not in clean(evil) and "\x07" not in clean(evil) and "\u202e" not in clean(evil)
    base = incident()
    hostile = replace(
        base,
        sentence=evil,
        headline=evil,
        origin=replace(
            base.origin, variable=evil, expression=evil, masked_by=evil, file=evil, function=evil, source=((1, evil),), module=evil
        ),
        notes=(Note(evil, evil),),
        remedies=(evil,),
        opaque=(evil,),
        snapshot=evil,
        framework=evil,
    )
    text = render_text(Verdict((hostile,), steps=1))
    assert not set(text) & {"\x1b", "\x07", "\u202e"}
    assert "[bold]x[/bold]" in text


def test_the_middle_of_a_long_chain_is_counted() -> None:
    """Twelve links are shown, the turn to backward once."""
    links = tuple(Link(f"value_{n}", n, math.inf, n > 5) for n in range(40))
    text = " ".join(render_text(Verdict((replace(incident(), chain=links),), steps=1)).split())
    chain = text[text.index("value_0") : text.index("tested ")]
    assert chain.startswith("value_0 +inf → value_1 +inf")
    assert "value_5 +inf → backward: ∂ value_6 +inf → ∂ value_7 +inf → ∂ value_8 +inf → … 28 more … → ∂ value_37 +inf" in chain
    assert chain.endswith("∂ value_39 +inf ") and chain.count("backward") == 1


def test_that_files_of_several_runs_are_told_as_one_is_said_beside_the_counts() -> None:
    """With an incident and without; whoever copied them together takes the counts for one run's otherwise."""
    note = Note("mixed_runs", "files of 2 runs lie in this directory")
    for verdict in (Verdict((incident(),), (note,), steps=3), Verdict((), (note,), steps=3)):
        assert "note: files of 2 runs lie in this directory" in render_text(verdict)


def test_the_headline_is_two_lines_at_80_columns() -> None:
    """Also of the 63rd rank of a large model, at a late token of a late row, with a scaler that skipped the step; and it says where that was."""
    case = next(case for case in CASES if case.name == "mask multiplies")
    snapshot = record(case.loss, *case.args()).snapshot()
    reached = replace(snapshot.reached, bad_gradients=291, gradients=291, bad_weights=0, weights=291, optimizer="AdamW")
    far = replace(snapshot, step=104123, rank=63, reached=replace(reached, stepped="skipped by the scaler"))
    wide = replace(snapshot, step=104123, rank=63, reached=replace(reached, bad_weights=291, stepped="taken"))
    for one in (far, wide):
        found = diagnose(one)
        assert " at row 1, token 3   " in found.headline
        headline = found.headline.replace("row 1, token 3", "row 511, token 2047")
        shown = plain(incident_shown(replace(found, headline=headline)), 80)
        assert shown.startswith("● step 104123") and len(shown.partition("\n\n")[0].splitlines()) == 2


def test_what_is_proposed_next_is_not_what_was_done() -> None:
    """After a run its replay, after a replay what comes then, or nothing but why."""
    found = incident()
    assert "  next  nanscope replay " in plain(incident_shown(found)) and "  next  nanscope repro " in plain(incident_shown(found, "repro"))
    assert "  next  " not in plain(incident_shown(found, "")) and "  why   nanscope explain " in plain(incident_shown(found, ""))


def test_a_fix_that_heals_is_written_out_where_nothing_is_left_to_measure_it_by(tmp_path: Path) -> None:
    """A mask that selects nothing leaves no healthy token: the line is there all the same, and says so; in every form of the report."""
    losses, mask = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3)
    with nanscope.watch(out=tmp_path / "runs") as scope:
        ((losses * mask).sum() / mask.sum()).backward()
    line = "((losses * mask).sum() / mask.sum().clamp(min=1.0)).backward()"
    for form in ("txt", "md", "html"):
        scope.report(tmp_path / f"report.{form}")
        text = (tmp_path / f"report.{form}").read_text()
        assert line in text and "which heals; healthy tokens not measured" in text
    assert not any(fix.proven for fix in scope.verdict.incidents[0].fixes if fix.executed)

"""The one table of what was tried: which rows, in which order, in which words; every renderer shows just these."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from io import BytesIO

import pytest
from matplotlib.text import Text
from verdicts import hostile, incident_of

from nanscope.locate.layout import Layout
from nanscope.report import figure
from nanscope.report.canvas import Canvas
from nanscope.report.html import render_html
from nanscope.report.markdown import render_markdown
from nanscope.report.terminal import render_text
from nanscope.report.tried import HEADS, NOT_RUN, Tried, distortion_words, groups_of, tried_json
from nanscope.snapshot.observation import Row
from nanscope.verdict.incident import Fix, Incident, Verdict


def rows(incident: Incident) -> list[Tried]:
    return [row for group in groups_of(incident) for row in group.rows]


def test_the_table_of_a_masked_overflow() -> None:
    """As it was, fixes, and the tempting wrong ones, with one best fix."""
    groups = groups_of(incident_of())
    assert [group.title for group in groups] == ["as it was", "fixes", "tempting, and wrong"]
    (best,) = (row for group in groups for row in group.rows if row.best)
    assert (best.id, best.outcome, best.healthy, best.state) == ("mask_before_op", "✓ best", "unchanged", "proven")
    assert all(row.state == "harm" and row.gradients == "1 of 1 bad" and row.bad for row in groups[2].rows)


ROWS = (
    (Row("a", "a", "recorded", math.nan, 1, 1, None, False, "reproduces bit for bit"), "NaN", "1 of 1 bad", "–", "reproduces bit for bit"),
    (Row("a", "a", "float64", 1.0, 0, 1, 0.0, True), "1", "finite", "unchanged", "reference"),
    (Row("a", "a", "float64", 1.0, 1, 1, 0.0, False), "1", "1 of 1 bad", "–", "fails even in float64"),
    (Row("a", "a", "fix", 1.0, 0, 3, 0.25, True), "1", "finite", "off by 25 %", "≈ changes healthy tokens by 25 %"),
    (Row("a", "a", "fix", 1.0, 0, 3, 0.01, True), "1", "finite", "off by 1 %", "✓ heals, too"),
    (Row("a", "a", "fix", 1.0, 0, 3, None, True), "1", "finite", "–", "≈ heals; healthy tokens not measured"),
    (Row("a", "a", "fix", 1.0, 2, 3, 0.25, False), "1", "2 of 3 bad", "–", "✗ does not heal"),
    (Row("a", "a", "fix", 1.0, 0, 3, math.inf, True), "1", "finite", "lost", "≈ healthy tokens lost"),
    (Row("a", "a", "fix", math.nan, 0, 3, 0.0, False), "NaN", "finite", "–", "✗ does not heal"),
    (Row("a", "a", "fix", None, 0, 0, None, False, "no such operand"), "–", "–", "–", "not run: no such operand"),
    (Row("a", "a", "fix", None, 0, 2, 0.0, True), "–", "finite", "unchanged", "✓ heals, too"),
    (Row("a", "a", "asked", None, 0, 0, None, False), "–", "–", "–", "not run"),
    (Row("a", "a", "objective", 1.0, 2, 8, None, False), "1", "2 of 8 tokens bad", "–", "✗ does not heal"),
    (Row("a", "a", "control", 1.0, 1, 1, None, False), "1", "1 of 1 bad", "–", "✗ tempting, and wrong"),
    (Row("a", "a", "control", 1.0, 0, 0, None, True), "1", "–", "–", "finite here, but the bad value is only hidden"),
)


@pytest.mark.parametrize(("row", "loss", "gradients", "healthy", "outcome"), ROWS)
def test_the_words_of_a_row(row: Row, loss: str, gradients: str, healthy: str, outcome: str) -> None:
    """What each outcome is called."""
    (tried,) = rows(incident_of(rows=(row,), fixes=()))
    assert (tried.loss, tried.gradients, tried.healthy, tried.outcome) == (loss, gradients, healthy, outcome)


@pytest.mark.parametrize(
    ("distortion", "words"),
    [(None, "–"), (0.0, "unchanged"), (1e-3, "off by 0.1 %"), (0.25, "off by 25 %"), (99.0, "off by 9900 %"), (1e6, "off by 1e+08 %"),
     (math.inf, "lost")],
)  # fmt: skip
def test_the_words_of_a_distortion(distortion: float | None, words: str) -> None:
    """A share of the largest healthy gradient."""
    assert distortion_words(distortion) == words


def test_rows_stand_under_what_came_of_them() -> None:
    """The order is that of a reader: what was asked for before what is known to be wrong, what could not be run last."""
    kinds = (("control", 1.0, True), ("fix", None, False), ("asked", None, False), ("control", 1.0, False), ("objective", 1.0, True))
    given = tuple(Row(str(n), "", kind, loss, 0, 0, None, works) for n, (kind, loss, works) in enumerate((*kinds, ("fix", 1.0, True))))
    groups = groups_of(incident_of(rows=given, fixes=()))
    assert [(group.title, [row.id for row in group.rows]) for group in groups] == [
        ("fixes", ["5"]),
        ("asked for", ["2", "4"]),
        ("tempting, and wrong", ["3"]),
        ("pass here, but mend the result and not its cause", ["0"]),
        (NOT_RUN, ["1"]),
    ]


def test_one_row_is_the_best_and_no_control_ever() -> None:
    """The first fix that works; the same edit asked for again is not a second best, and hiding a value never is the best."""
    fix = Fix("a", "b", None, True, True, distortion=0.0)
    twice = (Row("a", "b", "fix", 1.0, 0, 1, 0.0, True), Row("a", "b", "asked", 1.0, 0, 1, 0.0, True))
    assert [row.best for row in rows(incident_of(rows=twice, fixes=(fix,)))] == [True, False]
    assert [row.outcome for row in rows(incident_of(rows=twice[1:], fixes=(fix,)))] == ["✓ best"]
    hidden = (Row("a", "b", "control", 1.0, 0, 1, 0.0, True),)
    assert not [row for row in rows(incident_of(rows=hidden, fixes=(fix,))) if row.best]


def test_a_step_without_a_loss_was_run_all_the_same() -> None:
    """Of an optimizer's update there is no loss; its rows say what came out and not that nothing was run."""
    incident = incident_of("optimizer")
    assert all(row.loss is None for row in incident.rows)
    assert NOT_RUN not in [group.title for group in groups_of(incident)]
    assert [row.id for row in rows(incident) if row.outcome == "✓ best"] == [incident.fixes[0].id]


def test_json_has_the_figures_and_the_words() -> None:
    """Every field of a row, lossless, with what the table says of it."""
    incident = incident_of()
    data = json.loads(json.dumps(tried_json(incident)))
    assert [row["id"] for row in data] == [row.id for row in rows(incident)]
    assert [(row["outcome"], row["best"]) for row in data] == [(row.outcome, row.best) for row in rows(incident)]
    fields = {field.name for field in dataclasses.fields(Row)}
    assert all(set(row) == fields | {"proven", "outcome", "best"} for row in data)
    assert data[0]["loss"] == "nan"


@pytest.mark.parametrize("kind", ["forward masked", "backward, finite loss", "input", "optimizer", "history"])
def test_every_renderer_shows_the_same_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminal, page and picture have the same heads and cells, in the same order."""
    incident = incident_of(kind)
    canvases: list[Canvas] = []
    monkeypatch.setattr(Canvas, "write", lambda canvas, path: canvases.append(canvas))
    figure.render_figure(Verdict((incident,)), BytesIO())
    shown = {
        "terminal": render_text(Verdict((incident,))),
        "page": render_html(Verdict((incident,))),
        "picture": "\n".join(text.get_text() for text in canvases[0].figure.findobj(Text)),
    }
    wanted = [row for group in groups_of(incident) for row in group.rows if group.title != NOT_RUN][: figure.ROWS]
    for name, text in shown.items():
        start = text.index(HEADS[3])
        for row in wanted:
            start = text.index(row.id, start)
            words = {*row.outcome.split(), *row.gradients.split()}
            assert all(word in text[start:] for word in words), (name, row)  # a terminal folds them


def test_hostile_rows_are_clean() -> None:
    """No cell holds a character that hides or commands."""
    for row in rows(hostile().incidents[0]):
        for cell in (row.id, row.label, row.outcome):
            assert cell.isprintable()


def test_what_has_no_tokens_has_elements() -> None:
    """Of a batch of states, or a vector, nothing is said of tokens, in any form."""
    incident = incident_of()
    assert incident.tokens is not None
    states = replace(incident, tokens=replace(incident.tokens, layout=Layout.COLUMNS), origin=replace(incident.origin, batch=()))
    words = [form(Verdict((one,))) for one in (incident, states) for form in (render_text, render_html, render_markdown)]
    assert ["healthy tokens" in text for text in words] == [True] * 3 + [False] * 3
    assert ["healthy elements" in text for text in words] == [False] * 3 + [True] * 3


def test_gradients_are_said_to_be_of_what_they_are() -> None:
    """Those of the weights, of which the strip and the chain tell, and those of what comes into the loss, which the table counts."""
    for text in (
        render_text(Verdict((incident_of(),))),
        render_html(Verdict((incident_of(),))),
        render_markdown(Verdict((incident_of(),))),
    ):
        assert "weight gradients" in text and "input gradients" in text
        assert not re.search(r"(?<!weight )(?<!input )(?<!other )gradients(</| \|| {2})", text)

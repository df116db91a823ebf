"""What the page's script reads, and what stands there without it: the same numbers, and nothing that JSON or a reader cannot hold."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from pages import Page
from recorded import record
from test_tokens import row_means, with_empty
from torch import Tensor
from verdicts import NASTY, hostile, incident_of, verdict_of

from nanscope.report.clean import LIMITS
from nanscope.report.history import panels_of
from nanscope.report.html import render_html
from nanscope.report.lookout import chart_data, lookout_of, map_data, short
from nanscope.report.markdown import render_markdown
from nanscope.report.origin import mask_words
from nanscope.report.terminal import render_text
from nanscope.verdict.diagnose import verdict as diagnosed
from nanscope.verdict.incident import Incident, Verdict
from nanscope.verdict.tokens import RECORDED, Track

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, '"n"'), (math.inf, '"i"'), (-math.inf, '"-i"'), (0.0, "0"), (-2.0, "-2"), (0.123456, "0.1235"), (1.23456e30, "1.235e+30")],
)
def test_a_number_is_short(value: float, text: str) -> None:
    """Four digits are enough to read, and what JSON has no number for is text that the script knows."""
    assert json.dumps(short(value)) == text


def test_the_data_of_the_script_are_those_of_the_verdict() -> None:
    """Windows, tracks and masks come through, and as many windows as are asked for."""
    incident = incident_of("forward masked")
    found = map_data(incident, LIMITS[0], 1)
    assert found is not None and incident.tokens is not None
    assert len(found["windows"]) == 1 and len(found["tracks"]) == len(incident.tokens.tracks)
    (window,) = found["windows"]
    assert [cell == "1" for cell in window["masked"][0]] == list((incident.tokens.windows[0].masked or ())[0])
    json.dumps(found, allow_nan=False)


def test_what_stands_there_without_a_script() -> None:
    """The origin's values, what is bad of the whole, and the rows with most of it."""
    incident = incident_of("forward masked")
    found = lookout_of(incident, LIMITS[0], 0)
    assert found is not None and found.summary.endswith("masked") and found.where.endswith("the loss does not count it")
    assert found.lines[0].bad and found.worst and any(tile.look == "bad" for tile in found.tiles)


def test_keys_are_of_what_is_drawn() -> None:
    """Of a batch in which nothing is masked, nothing says what masked looks like."""
    incident = incident_of("forward masked")
    assert incident.tokens is not None and incident.tokens.tiles_masked is not None
    none = tuple(tuple(0.0 for _ in line) for line in incident.tokens.tiles_masked)
    for tiles, masks in ((incident.tokens.tiles_masked, True), (none, False), (None, False)):
        found = dataclasses.replace(incident, tokens=dataclasses.replace(incident.tokens, tiles_masked=tiles))
        page = render_html(dataclasses.replace(verdict_of("forward masked"), incidents=(found,)))
        assert ('<i class="key grey">' in page, '<i class="key masked"></i> masked' in page) == (masks, masks)


@pytest.mark.parametrize(("value", "crossed"), [(math.inf, True), (math.nan, True), (-0.1376, False)])
def test_a_finite_origin_is_not_crossed_out(value: float, crossed: bool) -> None:
    """Of a value whose gradient went bad, the script draws the ring alone, as it stands there without it."""
    incident = incident_of("forward masked")
    found = map_data(dataclasses.replace(incident, origin=dataclasses.replace(incident.origin, value=value)), LIMITS[0], 1)
    assert found is not None and found["overflowed"] is crossed


def test_a_finite_origin_is_not_called_bad() -> None:
    """Where all numbers are finite, and a gradient is not, the map leads to the origin by another name."""
    incident = incident_of("forward masked")
    assert incident.tokens is not None
    main, *rest = incident.tokens.tracks
    finite = dataclasses.replace(incident.tokens, tracks=(dataclasses.replace(main, bad=0, bad_masked=0), *rest))
    found = lookout_of(dataclasses.replace(incident, tokens=finite), LIMITS[0], 0)
    assert found is not None and found.summary == "all finite"
    assert {row.text.partition(": ")[2] for row in found.worst} == {"the origin"}
    assert {tile.title.partition(": ")[2] for tile in found.tiles if tile.look == "bad"} == {"the origin"}


def test_the_id_of_a_token_keeps_its_digits() -> None:
    """151643 and 151600 are two tokens."""
    incident = with_ids(151_643, "")
    assert incident.tokens is not None
    found, data = (
        make(dataclasses.replace(incident, tokens=dataclasses.replace(incident.tokens, texts={})), LIMITS[0], 1)
        for make in (lookout_of, map_data)
    )
    assert found is not None and (found.lines[1].value, found.lines[1].median, found.lines[1].usual) == ("151643", "", "")
    assert data is not None and data["tracks"][1]["cells"]["as_recorded"][0][0][0] == 151_643


def with_ids(token: int, text: str) -> Incident:
    """An incident in which each token is the same one."""
    incident = incident_of("forward masked")
    assert incident.tokens is not None
    main = incident.tokens.tracks[0]
    cells = tuple(tuple(tuple(float(token) for _ in line) for line in window) for window in main.cells["as_recorded"])
    nan = dict.fromkeys(("median", "low", "high"), math.nan)
    ids = dataclasses.replace(main, name="input_ids", role="response_ids", limit=None, cells={"as_recorded": cells}, histogram=None, **nan)
    return dataclasses.replace(
        incident, tokens=dataclasses.replace(incident.tokens, tracks=(main, ids), texts={token: text, token + 1: "?"})
    )


def test_the_text_of_a_token_stands_beside_its_id() -> None:
    """With its blanks, clean and not long, and of what stands in the page alone."""
    for text, shown in ((" the", "␣the"), (NASTY, None), ("\n" * 60, None)):
        found, data = (make(with_ids(279, text), LIMITS[2], 1) for make in (lookout_of, map_data))
        assert found is not None and data is not None
        (beside,) = data["texts"].values()
        assert list(data["texts"]) == ["279"] and (shown is None or beside == shown) and len(beside) <= 16
        assert found.lines[1].value == f"279 “{beside}”" and not set(beside) & set("\x1b\u202e\ud800\n")


@cache
def per_row() -> Verdict:
    """A step in which row 57 of 64 has no token that counts."""
    return diagnosed([record(row_means, *with_empty(64, 48, 57)).snapshot()])


def test_one_number_a_row_is_called_by_its_row() -> None:
    """In every form of the report; element 57 of one row is said of a vector that is no batch."""
    (incident,) = per_row().incidents
    found = lookout_of(incident, LIMITS[0], 0)
    assert found is not None and found.title == "64 rows × 48 tokens" and found.summary == "1 of 64 non-finite"
    assert found.where == "row 57, and its token 0: masked, the loss does not count it" and found.worst[0].text == "row 57: bad"
    page, text, issue = render_html(per_row()), render_text(per_row()), render_markdown(per_row(), "a.png")
    for form in (page, text, issue):
        assert "row 57" in form and not re.search(r"(row 0|element 57)\b", form)
    assert '<rect class="ring" x="-0.16"' in page and 'width="48.32"' in page


def test_a_vector_that_is_no_batch_has_elements_and_no_rows() -> None:
    """Nothing says row 0, and nothing says tokens."""

    def scaled(rewards: Tensor, baseline: Tensor) -> Tensor:
        return (rewards / baseline).mean()

    verdict = diagnosed([record(scaled, torch.ones(9).requires_grad_(), torch.arange(9.0)).snapshot()])
    found = lookout_of(verdict.incidents[0], LIMITS[0], 0)
    assert found is not None and (found.title, found.where, found.worst) == ("9 elements", "element 0", ())
    page = Page(render_html(verdict)).text
    assert "the elements that the loss counts, as recorded. Elements are counted from 0" in page
    assert not re.search(r"\brow 0|rows? |token", page.partition("Values")[2].partition("Origin")[0])


def test_nothing_is_drawn_of_nothing() -> None:
    """An origin outside the file has no tokens."""
    assert lookout_of(incident_of("observed only"), LIMITS[0], 0) is None
    assert map_data(incident_of("observed only"), LIMITS[0], 6) is None


def test_charts_are_data_too() -> None:
    """Every point of every curve, and the limit."""
    (panel, *_) = panels_of(incident_of("history"))
    found = chart_data(panel)
    assert [len(curve["points"]) for curve in found["curves"]] == [len(line.points) for line in panel.series if line.points]
    json.dumps(found, allow_nan=False)


def test_hostile_names_are_clean_in_the_data() -> None:
    """No control character, and nothing that ends a script."""
    incident: Incident = hostile(Incident, NASTY)
    text = json.dumps(map_data(incident, LIMITS[0], 1), ensure_ascii=False)
    assert "\x1b" not in text and "\u202e" not in text and "\ud800" not in text
    page = render_html(verdict_of("forward masked"))
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert not set(data) & set("<>&")


def with_numbers() -> Verdict:
    """A step whose roles have numbers of every size."""
    incident = incident_of("forward masked")
    assert incident.tokens is not None
    main, *_ = incident.tokens.tracks
    sizes = [sign * size for size in (0.0, 1e-320, 7.277e-5, 1e-4, 0.5, 9999.4, 9999.6, 12345.0, 1e6, 3.4e38) for sign in (1, -1)]

    def of(size: float) -> Track:
        cells = tuple(tuple(tuple(size for _ in line) for line in window) for window in main.cells[RECORDED])
        return dataclasses.replace(main, name="x", limit=None, median=size, low=size, high=size, cells={RECORDED: cells})

    tokens = dataclasses.replace(incident.tokens, tracks=(main, *map(of, sizes)))
    return dataclasses.replace(verdict_of("forward masked"), incidents=(dataclasses.replace(incident, tokens=tokens),))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("text", [None, " <i>the</i>\u202e", "one number a row", "numbers"])
def test_the_script_shows_what_stands_there_without_it(tmp_path: Path, text: str | None) -> None:
    """In a browser the table of the origin, which the script writes anew, says the same numbers and texts, and the controls are there."""
    verdict = verdict_of("forward masked")
    known = {"one number a row": per_row, "numbers": with_numbers}
    if text is not None:
        verdict = known[text]() if text in known else dataclasses.replace(verdict, incidents=(with_ids(279, text),))
    page = render_html(verdict)
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run(
        [str(BROWSER), *options, f"file://{tmp_path}/report.html"], capture_output=True, text=True, timeout=120, check=True
    )

    def read(text: str) -> list[list[str]]:
        (body,) = re.findall(r'<table class="readout">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
        rows = re.findall(r"<tr.*?>(.*?)</tr>", body, re.DOTALL)
        return [[re.sub(r"<[^>]*>|\s", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)] for row in rows]

    assert read(done.stdout) == read(page)
    for part in (r'<p class="where"[^>]*>(.*?)</p>', r'<p class="ends">(.*?)</p>', r'<rect class="ring"([^>]*?)/?>(?:</rect>)?'):
        assert re.findall(part, done.stdout) == re.findall(part, page) != []
    assert 'class="controls" hidden' in page and 'class="controls" hidden' not in done.stdout
    assert len(re.findall("<option", done.stdout)) >= 3


def test_a_mean_of_masked_tokens_is_counted() -> None:
    """Nothing says that the loss leaves it out: it is its tokens that are masked."""
    (incident,) = per_row().incidents
    told = "not masked: the loss counts it, and all its tokens are multiplied by completion_mask = 0"
    assert (
        mask_words(incident.origin) == told
        and told in Page(render_html(per_row())).text
        and told in " ".join(render_text(per_row()).split())
    )

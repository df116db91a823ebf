"""`nanscope.report.figure`: one readable picture of every kind of verdict; no text is mathematics, and matplotlib stays as it was."""

from __future__ import annotations

import copy
import dataclasses
import math
import subprocess
import sys
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.text import Text
from verdicts import KINDS, NASTY, hostile, verdict_of

from nanscope.report import figure
from nanscope.report.canvas import HARM, PROVEN, TALLEST, WIDTH, Canvas
from nanscope.report.diff import hunks_of
from nanscope.report.figure import COLOURS, render_figure
from nanscope.report.map import LEVELS, grid_of
from nanscope.snapshot.observation import Diff
from nanscope.verdict.incident import Fix, Picture, Verdict


def drawn(verdict: Verdict) -> tuple[int, int]:
    """Draw a verdict and return width and height of the PNG."""
    buffer = BytesIO()
    render_figure(verdict, buffer)
    data = buffer.getvalue()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR"
    assert len(data) < 2_000_000
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def texts(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """Return every text that a picture is made of."""
    canvases: list[Canvas] = []
    monkeypatch.setattr(Canvas, "write", lambda canvas, path: canvases.append(canvas))
    render_figure(verdict, BytesIO())
    return [text for text in canvases[0].figure.findobj(Text) if text.get_text()]


def incident_of(kind: str = "forward masked", **changes: Any) -> Verdict:
    """Return a verdict on one incident, changed."""
    return Verdict((dataclasses.replace(verdict_of(kind).incidents[0], **changes),))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_picture(kind: str) -> None:
    """As wide as an issue shows it, as high as it has something to say."""
    width, height = drawn(verdict_of(kind))
    assert width == WIDTH
    assert 150 <= height <= (300 if verdict_of(kind).healthy else TALLEST)


def test_the_picture_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence, the line, the element, the limit, the fixes and the tempting wrong ones."""
    verdict = verdict_of("history")
    said = [text.get_text() for text in texts(verdict, monkeypatch)]
    together = " ".join(said)
    assert verdict.sentence.replace(" ", "") in together.replace(" ", "")
    assert any("ratio = torch.exp(logps - old_logps)" in text for text in said)
    for wanted in ("[1, 2]  90", "88.72", "exp overflows", "Proven fix", "✓ best", "✗ tempting, and wrong", "2 rows × 3 tokens"):
        assert any(wanted in text for text in said), wanted


def test_a_healthy_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has nothing else to say."""
    said = [text.get_text() for text in texts(verdict_of("healthy"), monkeypatch)]
    assert "● healthy" in said and any("no non-finite loss" in text for text in said)
    assert len(said) <= 4


@pytest.mark.parametrize("rc", [{}, {"text.usetex": True}, {"text.parse_math": True, "font.family": ["nothing"]}])
def test_no_text_is_read_as_mathematics(rc: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's own configuration is, `$` in a name is a dollar."""
    with matplotlib.rc_context(rc):
        verdict = incident_of(sentence="$\\frac{1}{0}$ and $x^", cause=next(iter(verdict_of("input").incidents)).cause)
        found = texts(verdict, monkeypatch)
        assert any("$\\frac{1}{0}$" in text.get_text() for text in found)
        assert not [text for text in found if text.get_parse_math() or text.get_usetex()]
        monkeypatch.undo()
        drawn(verdict)


@pytest.mark.parametrize("text", [NASTY, NASTY * 300, "$" * 30_000, "日本語 𝔘 🙂 " * 900, "word " * 9_000, "x" * 50_000])
def test_hostile_and_endless_strings(text: str) -> None:
    """They are spelled out, boxed or cut, without a warning, and the picture keeps its size."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        width, height = drawn(hostile(Verdict, text, 3))
        assert width == WIDTH and height <= TALLEST


def test_nothing_runs_out_of_the_canvas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless strings are cut where the canvas or the column ends."""
    for text in texts(hostile(Verdict, "W" * 5_000, 12), monkeypatch):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= WIDTH, text.get_text()[:60]


def test_matplotlib_is_left_as_it_was() -> None:
    """No setting changes, and no style of the user changes the picture."""
    before = copy.deepcopy(dict(matplotlib.rcParams))
    plain, dark = BytesIO(), BytesIO()
    render_figure(verdict_of("history"), plain)
    assert dict(matplotlib.rcParams) == before
    changes = {"axes.facecolor": "black", "lines.linewidth": 9, "image.origin": "lower", "text.color": "white", "savefig.bbox": "tight"}
    with matplotlib.rc_context(changes):
        render_figure(verdict_of("history"), dark)
    assert plain.getvalue() == dark.getvalue()


def test_pyplot_is_not_needed(tmp_path: Path) -> None:
    """A picture can be drawn inside a training process without its global figures, and without a display."""
    code = (
        "import sys; from nanscope.verdict.incident import Verdict; from nanscope.report import render; "
        f"render(Verdict((), steps=3), {str(tmp_path / 'a.png')!r}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {"PATH": "", "MPLCONFIGDIR": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=Path(figure.__file__).parents[2], timeout=120)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 72), (32, 1), (32, 72), (300, 300)])
def test_maps_of_every_form(rows: int, columns: int) -> None:
    """From one element to more than is shown."""
    last = (rows - 1, columns - 1)
    values = tuple(tuple(math.nan if (r, c) == last else r - c / 2 for c in range(columns)) for r in range(rows))
    masked = tuple(tuple((r + c) % 2 == 0 for c in range(columns)) for r in range(rows))
    shown = Picture("x", values, masked, rows - 1, columns - 1, 0, 0, rows, columns)
    width, height = drawn(incident_of(picture=shown))
    assert width == WIDTH and height <= TALLEST


def test_colours() -> None:
    """Masked elements are paler, bad ones are red even where they are masked, and every level has a colour."""
    from matplotlib.colors import to_rgba

    assert len(COLOURS) == 2 * LEVELS + 1
    shown = Picture("x", ((1.0, 1.0, math.inf),), ((False, True, True),), 0, 2, 0, 0, 1, 3)
    grid = grid_of(dataclasses.replace(verdict_of("input").incidents[0], picture=shown), 9, 9)
    assert grid is not None
    full, pale, bad = (figure._colour(grid, 0, c, to_rgba) for c in range(3))
    assert full == pytest.approx(to_rgba(COLOURS[-1])) and all(p > f for p, f in zip(pale[:3], full[:3], strict=True))
    assert bad == pytest.approx(to_rgba(HARM))


def test_advice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fix that was not run is no proven one."""
    verdict = incident_of("optimizer", fixes=(Fix("upcast_fp32", "compute this in float32", None, False, None),))
    said = " ".join(text.get_text() for text in texts(verdict, monkeypatch))
    assert "advised, not run: compute this in float32" in said and "Proven" not in said


def test_a_path_is_written(tmp_path: Path) -> None:
    """A path as text or as Path; a folder that is not there is an OSError."""
    render_figure(verdict_of("healthy"), tmp_path / "a.png")
    render_figure(verdict_of("healthy"), str(tmp_path / "b.png"))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with pytest.raises(FileNotFoundError):
        render_figure(verdict_of("healthy"), tmp_path / "nowhere" / "a.png")


@pytest.mark.parametrize("before", [True, False])
def test_a_patch_stands_where_it_goes(before: bool) -> None:
    """A line that is put before another one stands before it, and nothing is red that stays."""
    verdict = verdict_of("forward masked")
    place = dataclasses.replace(verdict.incidents[0].origin, file="/home/train.py", line=12)
    diff = Diff("/home/train.py", 12, () if before else ("y = x.exp()",), ("x = x.clamp(max=20.0)",), ("a = 1",), ("y = x.exp()", "b = 2"))
    lines = figure._change_at(place, hunks_of(Fix("clamp_exponent", "", "", True, True, diffs=(diff,))))
    shown = [(number, words, edge) for number, words, edge, _ in lines]
    added = ("+", "x = x.clamp(max=20.0)", PROVEN)
    if before:
        assert shown == [("11", "a = 1", ""), added, ("12", "y = x.exp()", ""), ("13", "b = 2", "")]
    else:
        assert shown[:3] == [("11", "a = 1", ""), ("12", "y = x.exp()", HARM), added]
    assert figure._change_at(dataclasses.replace(place, line=99), hunks_of(Fix("clamp_exponent", "", "", True, True, diffs=(diff,)))) == []

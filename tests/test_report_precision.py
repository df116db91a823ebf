"""The precision of a step as people read it: every form has the same figures, is complete, and shows nothing hostile."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from recorded import record
from test_precision import batch, grpo
from typer.testing import CliRunner

from nanscope.__main__ import app
from nanscope.errors import NanscopeError
from nanscope.foresight.precision import precision
from nanscope.foresight.precision_model import Precision
from nanscope.report.precision import RENDERERS, render_precision
from nanscope.report.precision_tables import tables
from nanscope.snapshot.file import save


@pytest.fixture(scope="module")
def found() -> Precision:
    torch.manual_seed(0)
    return precision(record(grpo, *batch(torch.bfloat16)).snapshot())


class Cells(HTMLParser):
    """The text of every cell of a table, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.inside = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.cells[-1] += data


def test_every_cell_is_on_the_page_and_in_the_terminal(found: Precision, tmp_path: Path) -> None:
    """The renderers draw one table, and leave nothing of it out."""
    page = Cells()
    render_precision(found, tmp_path / "page.html")
    page.feed((tmp_path / "page.html").read_text())
    text = RENDERERS[".txt"](found).decode()
    shown = [cell for part in tables(found) for row in part.rows for cell in row.cells]
    assert len(tables(found)) == 5 and len(shown) > 60
    assert page.cells == [cell for part in tables(found) for cell in (*part.heads, *(cell for row in part.rows for cell in row.cells))]
    joined = " ".join(text.split())
    assert found.sentence in joined
    assert all(word in joined for cell in shown for word in cell.split())
    assert not {"script", "link", "img", "iframe"} & set(page.tags)


def test_the_figures_are_those_that_were_measured(found: Precision) -> None:
    """The first row is the step as recorded, and each call stands with what it costs alone and what is left with a wider one."""
    calls = tables(found)[0]
    assert calls.rows[0].cells[0] == "as recorded" and calls.rows[0].strong
    worst = found.calls[0]
    assert worst.alone is not None and worst.wider is not None
    row = calls.rows[2]
    assert worst.called[:40] in row.cells[0] and row.cells[1] == worst.where and row.part == 1.0
    assert row.cells[5] == f"float32: {100 * worst.wider.gradient:.2g} % left"


def test_the_picture_is_drawn(found: Precision, tmp_path: Path) -> None:
    """A PNG of some size, also of a step that is not finite."""
    pytest.importorskip("matplotlib")
    lost = replace(found, recorded=replace(found.recorded, loss=float("inf"), gradient=float("inf")))
    for name, one in (("a.png", found), ("b.png", lost)):
        render_precision(one, tmp_path / name)
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG" and (tmp_path / name).stat().st_size > 10_000


def test_json_and_unknown_suffixes(found: Precision, tmp_path: Path) -> None:
    """JSON is the data; a suffix that nobody writes is an error with the ones there are."""
    render_precision(found, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["sentence"] == found.sentence
    with pytest.raises(NanscopeError, match=r"\.html, \.png, \.txt, \.json"):
        render_precision(found, tmp_path / "found.pdf")


def test_the_verb(tmp_path: Path) -> None:
    """`nanscope precision FILE`: status 3 where rounding changes the gradient by more than 1 %, 0 where it does not, 1 where nothing can be
    measured; --json and -o as elsewhere."""
    fine, bad = (record(grpo, *batch(dtype, apart=0.3)).snapshot() for dtype in (torch.float32, torch.bfloat16))
    assert not precision(fine).harmful and precision(bad).harmful
    runner = CliRunner()
    for name, snapshot, status in (("fine", fine, 0), ("bad", bad, 3)):
        file = save(snapshot, tmp_path / name)
        said = runner.invoke(app, ["precision", str(file), "--json", str(tmp_path / "told.json")])
        assert (said.exit_code, json.loads((tmp_path / "told.json").read_text())["harmful"]) == (status, status == 3)
        assert "as recorded" in said.output and "clip decides" in said.output
        assert runner.invoke(app, ["precision", str(file), "-o", str(tmp_path / "page.html")]).exit_code == status
        assert "as recorded" in (tmp_path / "page.html").read_text()
    empty = save(replace(fine, program=replace(fine.program, calls=(), leaves=()), tensors={}), tmp_path / "empty")
    failed = runner.invoke(app, ["precision", str(empty)])
    assert isinstance(failed.exception, NanscopeError) and failed.exception.slug == "nothing-to-measure"


def test_the_report_of_a_snapshot_has_a_section(tmp_path: Path) -> None:
    """`nanscope report FILE` shows the same tables on the page, in text and as data; where nothing can be measured it goes without."""
    bad = batch(torch.bfloat16)
    bad[1][0, 0] = -300.0
    file = save(record(grpo, *bad).snapshot(), tmp_path / "bad")
    runner, told = CliRunner(), precision(record(grpo, *bad).snapshot())
    for name in ("page.html", "page.txt", "page.json", "page.png"):
        assert runner.invoke(app, ["report", str(file), "-o", str(tmp_path / name)]).exit_code == 3
    page = Cells()
    page.feed((tmp_path / "page.html").read_text())
    assert [cell for cell in page.cells if cell == "as recorded"] and "what rounds" in page.cells
    assert told.sentence in " ".join((tmp_path / "page.txt").read_text().split())
    assert json.loads((tmp_path / "page.json").read_text())["precision"]["sentence"] == told.sentence
    bad[1][0, 0] = float("nan")
    file = save(record(grpo, *bad).snapshot(), tmp_path / "nan")
    assert runner.invoke(app, ["report", str(file), "-o", str(tmp_path / "nan.html")]).exit_code == 3
    assert "what rounds" not in (tmp_path / "nan.html").read_text()


def test_names_from_a_file_are_no_markup(found: Precision) -> None:
    """What a file calls its variables is text."""
    hostile = replace(found, calls=tuple(replace(row, name="<script>x</script>\u202e") for row in found.calls))
    page = Cells()
    page.feed(RENDERERS[".html"](hostile).decode())
    assert "script" not in page.tags and not any("\u202e" in cell for cell in page.cells)

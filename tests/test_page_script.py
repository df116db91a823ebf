"""What the page does when a person acts on it: each click, tap and key comes to something, or is answered with what it cannot do."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import record
from test_lookout import BROWSER
from test_tokens import batch, loss

from nanscope.report.html import render_html
from nanscope.snapshot.file import save
from nanscope.verdict.diagnose import verdict as diagnosed

ROWS, COLUMNS, BAD = 200, 300, (12, 40)


@cache
def broken() -> Any:
    logps, ref, advantages, mask = batch(ROWS, COLUMNS, {BAD: True})
    with torch.no_grad():
        logps[5, 50] = ref[5, 50] = -900.0  # far out, and healthy
    return record(loss, logps, ref, advantages, mask).snapshot()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[screenshots]'")
    with api.sync_playwright() as playwright:
        if BROWSER is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium is installed: apt-get install chromium, or playwright install chromium")
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def sheet(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """The page of a broken step on a batch that is larger than what the page keeps, its snapshot beside it; any error of its script fails."""
    path = save(broken(), tmp_path / "GROWTH [ROW, COLUMN %]")  # which the command that is shown names
    (tmp_path / "report.html").write_text(render_html(diagnosed([broken()], paths=[str(path)])), encoding="utf-8")
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(f"file://{tmp_path}/report.html")
    yield page
    context.close()
    assert errors == []


def click_tiles(sheet: Any, row: int, column: int) -> None:
    tiles = sheet.locator("svg.tiles")
    tiles.scroll_into_view_if_needed()
    box = tiles.bounding_box()
    tiles.click(position={"x": (column + 0.5) / COLUMNS * box["width"], "y": (row + 0.5) / ROWS * box["height"]})


def test_a_click_outside_of_what_is_kept_goes_to_the_nearest_and_says_so(sheet: Any, tmp_path: Path) -> None:
    """And the command that it names prints the values there."""
    assert sheet.locator(".away").is_hidden()
    click_tiles(sheet, 190, 290)
    said = sheet.locator(".away").inner_text()
    row, column = (int(word.strip(",")) for word in said.split("The values at row ")[1].split(" are not")[0].split(" token "))
    assert abs(row - 190) <= 3 and abs(column - 290) <= 2 and "Shown is the nearest that is" in said
    assert sheet.locator(".readout tbody tr").count() > 4 and not sheet.locator("p.where").inner_text().startswith("row 12")
    command = sheet.locator(".away code").inner_text()
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=True)
    assert f"ref_logps {float(broken_tensor('ref_logps')[row, column])}" in done.stdout
    sheet.locator(".worst button").first.click()
    assert sheet.locator(".away").is_hidden() and sheet.locator("p.where").inner_text().startswith("row 12, token 40")


def broken_tensor(name: str) -> Any:
    snapshot = broken()
    (leaf,) = [leaf for leaf in snapshot.program.leaves if leaf.name == name]
    return snapshot.tensors[leaf.id]


def test_the_keys_go_through_what_is_kept(sheet: Any) -> None:
    """From the overview to each window in turn; in the map, not over its edge without a word."""
    sheet.locator("svg.tiles").focus()
    seen = set()
    for _ in range(sheet.locator(".tiles .kept").count()):
        sheet.keyboard.press("ArrowRight")
        seen.add(sheet.locator(".tiles .here").evaluate("node => node.getAttribute('x') + ' ' + node.getAttribute('y')"))
        assert sheet.locator(".away").is_hidden()
    assert len(seen) == sheet.locator(".tiles .kept").count() > 1


def test_a_role_with_an_outlier_has_colours(sheet: Any) -> None:
    """Most of the log-probs are not of one colour, and the legend says what the outlier has."""
    assert sheet.locator(".beyond").is_hidden()
    for name in ("logps", "ref_logps"):
        names = sheet.locator("select.track option").all_inner_texts()
        sheet.locator("select.track").select_option(index=next(n for n, text in enumerate(names) if text.split(" ")[0] == name))
        assert {layer.get_attribute("class") for layer in sheet.locator("g.layers path").all()} >= {"n1", "n2", "n3", "n4", "n5"}
        assert sheet.locator(".beyond").is_visible() and sheet.locator(".scale b").first.inner_text().startswith("≤ −1.")
        assert "1 below" in sheet.locator(".ends").inner_text() or "2 below" in sheet.locator(".ends").inner_text()


def bars(sheet: Any) -> list[str]:
    return [sheet.locator(f".histogram .{kind}").get_attribute("d") for kind in ("counted", "hidden")]


def test_the_histogram_is_that_of_the_chosen_run(sheet: Any) -> None:
    """And says so; the rows above the map are those of the recording, and say that."""
    of = sheet.locator(".histogram .of")
    assert of.inner_text() == "as recorded" and sheet.locator(".worst-of").inner_text() == "worst rows, as recorded"
    names = sheet.locator("select.track option").all_inner_texts()
    for name, changed in (("gradient of logps", True), ("logps", False)):
        sheet.locator("select.track").select_option(index=next(n for n, text in enumerate(names) if text.startswith(name)))
        sheet.locator("select.run").select_option(index=0)
        recorded = bars(sheet)
        sheet.locator("select.run").select_option(index=1)
        assert (bars(sheet) != recorded) is changed
        assert of.inner_text() == ("with the fix" if changed else "with the fix, the same as recorded")


def test_a_row_of_the_chain_steps_to_its_link(sheet: Any) -> None:
    """Anywhere on it, also where it has no line of source, and with the keyboard; marking its text does not."""
    rows = sheet.locator(".chain li")
    for n in range(rows.count()):
        rows.nth(n).click(position={"x": 40, "y": 8})
        assert sheet.locator(".step-at").inner_text() == f"{n + 1} of {rows.count()}"
        assert rows.nth(n).get_attribute("class").split()[-1] == "here"
    sheet.keyboard.press("Home")
    sheet.keyboard.press("ArrowDown")
    assert sheet.locator(".step-at").inner_text().startswith("2 of") and sheet.locator(".source .lit").count() == 1
    box = rows.nth(0).bounding_box()
    sheet.mouse.move(box["x"] + 30, box["y"] + 12)
    sheet.mouse.down()
    sheet.mouse.move(box["x"] + 120, box["y"] + 12, steps=4)
    sheet.mouse.up()
    assert len(sheet.evaluate("getSelection().toString()")) > 3 and sheet.locator(".step-at").inner_text().startswith("2 of")


def test_why_is_read_without_a_click(sheet: Any) -> None:
    """After the fix, and before the evidence."""
    assert sheet.locator(".why p").first.is_visible()
    place = {name: sheet.locator(f"#incident-1-{name}").bounding_box()["y"] for name in ("why", "tokens")}
    assert sheet.locator(".fix").bounding_box()["y"] < place["why"] < place["tokens"]
    assert sheet.locator(".worst").bounding_box()["y"] < sheet.locator("svg.cells").bounding_box()["y"]

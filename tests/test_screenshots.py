"""How the page looks: a broken run and a healthy one, drawn by Chromium in four forms and compared with pictures. A change that is meant is
accepted with

    pip install -e '.[screenshots]' -c tests/constraints.txt && pytest tests/test_screenshots.py --accept

and looked at in tests/golden before it is committed. Runs where Chromium is: on PATH, or what `playwright install chromium` fetched.

Two machines lay the page out alike: the text is set in DejaVu, which comes with matplotlib, its hinting is off, and nothing of the machine is
in it. So the size must be the same. What differs is how edges are smoothed, which moves the mean over a square of some pixels a little,
whereas a box that moved, a colour that changed or a section that is gone moves it far. So means are compared, of small squares with a wide
tolerance and of large ones with a narrow one, and not one square may be off by more. Measured, in levels of 255, the worst square of all:

                                                          12 pixels wide    48 pixels wide    of a picture at two thirds
    Chromium 150, and 153                                            8.5               2.5
    drawn at once, and twice as large and made smaller              12.9               4.6
    what the palette of the kept file takes away                    14.2               1.4
    tolerated                                                       16                 6
    planted: the map 3 pixels to the right                          30                 5.4
    planted: a paler box of the fix                                 11                11

A grey that is a little lighter, or a dashed line that is gone, stays below it.
"""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import drifting
import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageChops
from test_lookout import BROWSER
from verdicts import still_verdict

import nanscope
from nanscope.report.html import render_html

GOLDEN = Path(__file__).parent / "golden"
RUNS = {"broken": drifting.LAST, "healthy": drifting.CALM}  # steps
SCALE = 2 / 3  # of the pictures that are kept: legible, and half the bytes
MOST_BYTES = 170_000
TOLERANCES = {12: 16.0, 48: 6.0}  # edge of a square in pixels, and levels of 255 that the mean of a channel may be off by


@dataclass(frozen=True, slots=True)
class Form:
    """What a page is drawn on."""

    width: int
    height: int
    scheme: str = "light"
    media: str = "screen"


FORMS = {
    "desktop": Form(1200, 900),
    "phone": Form(390, 844),
    "dark": Form(1200, 900, scheme="dark"),
    "print": Form(794, 1123, media="print"),  # A4 at 96 pixels an inch
}
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb", "--font-render-hinting=none", "--disable-lcd-text"]
CASES = [(run, form) for run in RUNS for form in FORMS]


@cache
def page(run: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        with nanscope.watch(out=folder) as scope:
            drifting.train(RUNS[run])
        return render_html(still_verdict(scope.verdict))


@cache
def fonts() -> str:
    """The same letters on every machine."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"

    def face(family: str, file: str, weight: int) -> str:
        data = base64.b64encode((folder / file).read_bytes()).decode()
        return f"@font-face {{ font-family: {family}; font-weight: {weight}; src: url(data:font/ttf;base64,{data}); }}"

    sans = face("Sheet", "DejaVuSans.ttf", 400) + face("Sheet", "DejaVuSans-Bold.ttf", 700)
    mono = face("SheetMono", "DejaVuSansMono.ttf", 400) + face("SheetMono", "DejaVuSansMono-Bold.ttf", 700)
    return f"{sans}{mono}:root {{ --sans: Sheet; --mono: SheetMono; }}"


Draw = Callable[..., Image.Image]


@pytest.fixture(scope="module")
def draw() -> Iterator[Draw]:
    """Draws the whole page of a run in a form. css: planted in it; sharpness: pixels drawn for each one of the picture."""
    api = pytest.importorskip("playwright.sync_api", reason="screenshots need playwright: pip install -e '.[screenshots]'")
    with api.sync_playwright() as playwright:
        if BROWSER is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium is installed: apt-get install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)

        def drawn(run: str, form: str, css: str = "", sharpness: int = 1) -> Image.Image:
            wanted = FORMS[form]
            size = {"width": wanted.width, "height": wanted.height}
            context = browser.new_context(viewport=size, device_scale_factor=sharpness, bypass_csp=True)  # the page allows no fonts
            sheet: Any = context.new_page()
            sheet.emulate_media(media=wanted.media, color_scheme=wanted.scheme)
            sheet.set_content(page(run))
            sheet.add_style_tag(content=fonts() + css)
            sheet.evaluate("document.fonts.ready.then(() => document.fonts.size)")
            shot = Image.open(io.BytesIO(sheet.screenshot(full_page=True))).convert("RGB")
            context.close()
            return shot.resize((round(SCALE * shot.width / sharpness), round(SCALE * shot.height / sharpness)), Image.Resampling.BOX)

        yield drawn
        browser.close()


def differences(accepted: Image.Image, now: Image.Image) -> list[str]:
    """Say where two pictures differ by more than what another machine does."""
    if accepted.size != now.size:
        return [f"{now.width} × {now.height} pixels, and was {accepted.width} × {accepted.height}"]
    found = []
    for edge, most in TOLERANCES.items():
        off = np.abs(means(accepted, edge) - means(now, edge)).max(-1)
        row, column = np.unravel_index(off.argmax(), off.shape)
        if off.max() > most:
            place = f"the worst at {int(column) * edge}, {int(row) * edge}: by {off.max():.0f}"
            found.append(f"{(off > most).sum()} squares of {edge} pixels are off by more than {most:.0f}, {place}")
    return found


def means(picture: Image.Image, edge: int) -> np.ndarray[Any, Any]:
    """The mean of each channel over the squares of a picture, which all but fit."""
    sums = np.asarray(picture, dtype=np.float64)
    for axis in (0, 1):
        size = sums.shape[axis]
        borders = np.linspace(0, size, max(1, size // edge) + 1).astype(int)
        widths = np.diff(borders).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        sums = np.add.reduceat(sums, borders[:-1], axis) / widths
    return sums


def golden(run: str, form: str) -> Path:
    return GOLDEN / f"screenshot-{run}-{form}.png"


def kept(run: str, form: str) -> Image.Image:
    return Image.open(golden(run, form)).convert("RGB")


@pytest.mark.parametrize(("run", "form"), CASES)
def test_the_page_looks_as_accepted(run: str, form: str, draw: Draw, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Nobody changes how it looks without seeing it."""
    now = draw(run, form)
    if request.config.getoption("--accept"):
        now.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(tmp_path / "now.png", optimize=True)
        golden(run, form).write_bytes((tmp_path / "now.png").read_bytes())
    found = differences(kept(run, form), now)
    if found:
        now.save(tmp_path / "now.png")
        if now.size == kept(run, form).size:
            ImageChops.difference(kept(run, form), now).save(tmp_path / "difference.png")
        pytest.fail(
            f"{golden(run, form).name}: {'; '.join(found)}\n{tmp_path} has it as it is now. If that is meant: "
            "pytest tests/test_screenshots.py --accept",
            pytrace=False,
        )


PLANTED = {
    "a section is gone": ("desktop", "section:has(#incident-1-history) { display: none; }"),
    "a section is invisible": ("phone", "section:has(#incident-1-origin) > div { visibility: hidden; }"),
    "the map is shifted by 3 pixels": ("desktop", ".map { position: relative; left: 3px; }"),
    "the map is shifted on a phone": ("phone", ".map { position: relative; top: 5px; }"),
    "the hatch of masked tokens is red": ("desktop", ":root { --hatch: rgba(200, 41, 11, .62); }"),
    "the hatch of masked tokens is not there": ("print", ".hatch { display: none; }"),
    "the hatch is that of the light page": ("dark", ":root { --hatch: rgba(60, 64, 70, .62); }"),
    "the origin has no ring": ("desktop", ".ring { display: none; }"),
    "a word is not red": ("desktop", ".facts .harm b { color: var(--ink); }"),
    "a sign of the legend is gone": ("dark", ".legend .bad { visibility: hidden; }"),
    "the box of the fix is paler": ("desktop", ":root { --proven-veil: #f0f9f4; }"),
    "the paper is not white": ("print", ":root { --paper: #f6f6f0; }"),
    "no curve is drawn": ("phone", ".curve, .dots { visibility: hidden; }"),
    "the text is smaller": ("print", "body { font-size: 10.5pt; }"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_seen(what: str, draw: Draw) -> None:
    """The comparison is red of each of them."""
    form, css = PLANTED[what]
    assert differences(kept("broken", form), draw("broken", form, css))


@pytest.mark.parametrize("form", FORMS)
def test_edges_may_be_smoothed_in_another_way(form: str, draw: Draw) -> None:
    """A page that is drawn twice as large and then made smaller has other pixels along every letter and line, and is the same."""
    sharp = draw("broken", form, sharpness=2)
    plain = draw("broken", form)
    assert (np.asarray(sharp) != np.asarray(plain)).mean() > 0.02
    assert differences(plain, sharp) == []


def test_the_pictures_are_those_that_are_compared() -> None:
    """None is left over, and none is large."""
    found = list(GOLDEN.glob("*.png"))
    assert set(found) == {golden(run, form) for run, form in CASES}
    assert {path.name: path.stat().st_size for path in found if path.stat().st_size > MOST_BYTES} == {}


@pytest.mark.parametrize(("run", "form"), CASES)
def test_a_box_that_moved_is_seen(run: str, form: str) -> None:
    """Without a browser: a strip of each picture, moved by 4 pixels, is refused, and the picture itself is not."""
    picture = kept(run, form)
    strip = picture.crop((0, 60, picture.width, 200))
    moved = picture.copy()
    moved.paste(strip, (0, 64))
    assert differences(picture, picture) == [] and differences(picture, moved)

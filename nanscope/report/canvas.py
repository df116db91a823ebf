"""The canvas that a picture is drawn on: text with its real width, boxes and axes in pixels from the top left, cut off under the drawing.

Nothing here reads or sets matplotlib's global state: no pyplot, every colour and font named, and text never read as mathematics, since `$`
in a string from a run is a dollar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.font_manager import FontProperties
    from matplotlib.ft2font import FT2Font

WIDTH, TALLEST = 1600, 1400  # pixels
DPI = 100
MARGIN = 56
PAPER, INK, SOFT, QUIET, HAIR, PANEL = "#ffffff", "#17191c", "#4a4f57", "#757b84", "#e2e2dc", "#f4f4f0"
HARM, HARM_VEIL, DOUBT, PROVEN, PROVEN_VEIL = "#c8290b", "#fbe9e4", "#8a5f0f", "#0b7250", "#e5f3ed"


class Canvas:
    """A figure that is drawn in pixels from the top left; `y` is where the next thing goes."""

    def __init__(self, width: int, height: int) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAPER, edgecolor=PAPER)
        self.figure.set_layout_engine("none")
        self.agg = FigureCanvasAgg(self.figure)
        self.fonts = {name: _Font(file) for name, file in _FONTS.items()}
        self.y = float(MARGIN - 12)

    def text(
        self, x: float, y: float, text: str, size: float = 16, colour: str = INK, font: str = "plain", align: str = "left", clip: float = 0
    ) -> float:
        """Write one line with its baseline at y and return where it ends. size: pixels. clip: pixels after which it is cut."""
        face = self.fonts[font]
        text = face.known(text)
        if clip:
            text = face.cut(text, size, clip)
        self.figure.text(
            x / self.width, 1 - y / self.height, text,
            fontproperties=face.properties, fontsize=size * 72 / DPI, color=colour, ha=align, va="baseline", usetex=False, parse_math=False,
        )  # fmt: skip
        return x + face.width(text, size)

    def paragraph(self, text: str, size: float, colour: str = INK, font: str = "plain", lines: int = 4) -> None:
        """Write wrapped text across the canvas and move on."""
        for line in self.fonts[font].wrap(text, size, self.width - 2 * MARGIN, lines):
            self.y += size * 1.4
            self.text(MARGIN, self.y, line, size, colour, font)

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Fill a rectangle; y is its top."""
        from matplotlib.patches import Rectangle

        place = (x / self.width, 1 - (y + height) / self.height)
        box = Rectangle(place, width / self.width, height / self.height, facecolor=colour, edgecolor="none", linewidth=0, zorder=-1)
        box.set_transform(self.figure.transFigure)
        self.figure.add_artist(box)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Return bare axes in a rectangle; y is its top."""
        axes = self.figure.add_axes((x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height))
        axes.set_axis_off()
        return axes

    def write(self, path: str | Path | BinaryIO) -> None:
        """Cut the canvas off under the drawing and write it."""
        import numpy
        from matplotlib.image import imsave

        self.agg.draw()  # type: ignore[no-untyped-call]
        buffer = self.agg.buffer_rgba()  # type: ignore[no-untyped-call]
        pixels = numpy.asarray(buffer)[: min(self.height, math.ceil(self.y + MARGIN - 16)), :, :3]
        imsave(path, numpy.ascontiguousarray(pixels), format="png", origin="upper", dpi=DPI)


_FONTS = {"plain": "DejaVuSans", "bold": "DejaVuSans-Bold", "code": "DejaVuSansMono", "code bold": "DejaVuSansMono-Bold"}


class _Font:
    """A font that comes with matplotlib: its metrics, and which characters it has."""

    def __init__(self, name: str) -> None:
        from matplotlib import get_data_path
        from matplotlib.font_manager import FontProperties
        from matplotlib.ft2font import FT2Font

        file = Path(get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
        self.properties: FontProperties = FontProperties(fname=str(file))
        self._face: FT2Font = FT2Font(str(file))
        self._face.set_size(100, 72)
        self._characters = self._face.get_charmap()

    def known(self, text: str) -> str:
        """Return text with a box for what the font does not have."""
        return "".join(char if ord(char) in self._characters else "□" for char in text)

    def width(self, text: str, size: float) -> float:
        """Return the width of text in pixels."""
        self._face.set_text(self.known(text), 0.0)
        return float(self._face.get_width_height()[0]) / 64 * size / 100 * 1.02  # hinting widens small sizes

    def cut(self, text: str, size: float, width: float) -> str:
        """Return as much of text as fits."""
        if self.width(text, size) <= width:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.width(text[:middle] + "…", size) <= width else (low, middle - 1)
        return text[:low] + "…"

    def wrap(self, text: str, size: float, width: float, lines: int) -> Iterator[str]:
        """Yield the lines of a paragraph; the last one is cut if there are more."""
        words = text.split()
        for number in range(lines):
            line = words.pop(0) if words else ""
            while words and number < lines - 1 and self.width(f"{line} {words[0]}", size) <= width:
                line += f" {words.pop(0)}"
            if number == lines - 1:
                line = " ".join([line, *words])
            if line:
                yield self.cut(line, size, width)

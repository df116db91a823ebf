"""The result: one table on the terminal, all of it as JSON, and a row of a history in Markdown.

    small  a PPO step of a robot's policy: actor and critic of two hidden layers, 256 samples
                              time                       ratio                 ratio, CPU time
      bare                    4.21 ms [4.11, 4.40]       1.000 [1.000, 1.000]  1.000 [1.000, 1.000]
      nanscope                6.98 ms [6.80, 7.21]       1.660 [1.631, 1.702]  1.655 [1.640, 1.671]

As JSON, with every time in seconds and every size in bytes:

    schema      1
    setting     date, cpu, cores, threads, load, gpu, system, python, torch, nanscope, commit
    quick       true where it was asked for: fewer rounds, and smaller sizes
    chapters    a list: name, words; rows; said: lines; left_out, failed: why, or ""
      rows      name; seconds, ratio, cpu_ratio: {median, low, high}, the quartiles; peak, peak_ratio: numbers; waits: a whole number.
                What was not measured is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.bench.measure import Figures, Quartiles
from nanscope.bench.subjects import Chapter, Setting
from nanscope.plain import show as plain_data
from nanscope.report.console import DOUBT, HARM, QUIET, STRONG, show, table

SCHEMA = 1
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
COLUMNS = {
    "time": "seconds",
    "ratio": "ratio",
    "ratio, CPU time": "cpu_ratio",
    "peak MB": "peak",
    "to bare": "peak_ratio",
    "waits": "waits",
}


def print_setting(setting: Setting, *, file: IO[str]) -> None:
    """Print where it is measured."""
    commit = f" ({setting.commit})" if setting.commit else ""
    gpu = f", {setting.gpu}" if setting.gpu else ""
    words = (
        f"nanscope {setting.nanscope}{commit}, torch {setting.torch}, Python {setting.python}; {setting.cpu}, cores: {setting.cores}, "
        f"threads: {setting.threads}{gpu}; medians [quartiles]"
    )
    parts: list[RenderableType] = [Text(words, QUIET)]
    if setting.is_loaded:
        parts.append(Text(f"other work wants these cores (load {setting.load}): read the ratios by CPU time, and no times", DOUBT))
    show(Group(*parts), file=file)


def print_chapter(chapter: Chapter, *, file: IO[str]) -> None:
    """Print one subject."""
    parts: list[RenderableType] = [Text.assemble("\n", (chapter.name, STRONG), f"  {chapter.words}")]
    if chapter.rows:
        parts.append(Padding(_rows(chapter.rows), (0, 0, 0, 2)))
    parts += [Padding(Text(line, QUIET), (0, 0, 0, 2)) for line in chapter.said]
    if chapter.left_out:
        parts.append(Padding(Text(f"left out: {chapter.left_out}", DOUBT), (0, 0, 0, 2)))
    if chapter.failed:
        parts.append(Padding(Text(f"FAILED: {chapter.failed}", HARM), (0, 0, 0, 2)))
    show(Group(*parts), file=file)


def _rows(rows: Sequence[Figures]) -> RenderableType:
    heads = [head for head, field in COLUMNS.items() if any(getattr(row, field) is not None for row in rows)]
    found = table("", *heads)
    for column in found.columns:
        column.no_wrap = True
    found.columns[0].min_width = 31  # the tables of all subjects stand under each other
    for row in rows:
        found.add_row(Text(row.name), *(_cell(getattr(row, COLUMNS[head]), COLUMNS[head]) for head in heads))
    return found


def _cell(value: Quartiles | float | None, field: str) -> str:
    if value is None:
        return ""
    if isinstance(value, Quartiles):
        return time_of(value) if field == "seconds" else value.show()
    if field == "waits":
        return str(value)
    return f"{value / 1e6:.1f}" if field == "peak" else f"{value:.3f}"


def time_of(seconds: Quartiles) -> str:
    """Return a time in the unit that it is best read in: 4.21 ms [4.11, 4.40]."""
    scale, unit = next((one for one in UNITS if abs(seconds.median) >= one[0]), UNITS[-1])
    shown = seconds.over(scale)
    return f"{shown.median:.2f} {unit} [{shown.low:.2f}, {shown.high:.2f}]"


def to_json(setting: Setting, chapters: Sequence[Chapter], quick: bool) -> dict[str, Any]:
    """Return all of it as JSON data, as this file's head says."""
    found: dict[str, Any] = plain_data(
        {"schema": SCHEMA, "setting": asdict(setting), "quick": quick, "chapters": [chapter.to_json() for chapter in chapters]}
    )
    return found


# -- a history ---------------------------------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """A column of the history: which figure of which row of which subject. scale: of its unit, in seconds; 0 for a ratio."""

    head: str
    subject: str
    row: str
    scale: float = 0


HISTORY = (
    Told("call [µs]", "call", "a recorded call, added", 1e-6),
    Told("small", "small", "nanscope"),
    Told("24m", "24m", "nanscope"),
    Told("150m", "150m", "nanscope"),
    Told("generation", "generation", "24 M, nanscope"),
    Told("sac", "sac", "nanscope"),
    Told("ppo", "ppo", "nanscope"),
    Told("dqn", "dqn", "nanscope"),
    Told("trl", "trl", "nanscope"),
    Told("ddp", "ddp", "nanscope"),
    Told("64x1024 [s]", "verdict", "64x1024 verdict", 1.0),
    Told("512x8192 [s]", "verdict", "512x8192 verdict", 1.0),
)
HEAD = f"| date | machine | nanscope | torch | {' | '.join(column.head for column in HISTORY)} |"
RULE = "| --- " * (4 + len(HISTORY)) + "|"


def history_row(setting: Setting, chapters: Sequence[Chapter], quick: bool) -> str:
    """Return a run as a row of the history: without the name of the machine, and marked where other work disturbed it."""
    marks = "".join(f", {mark}" for mark, so in ((f"loaded: {setting.load}", setting.is_loaded), ("quick", quick)) if so)
    threads = f"{setting.threads} of {setting.cores} cores"
    release = f"{setting.nanscope} {setting.commit}".strip()
    known = {chapter.name: chapter for chapter in chapters}
    cells = [_told(column, known.get(column.subject)) for column in HISTORY]
    machine = f"{setting.cpu}, {threads}{f', {setting.gpu}' if setting.gpu else ''}{marks}"
    return " | ".join([f"| {setting.date}", machine, release, setting.torch, *cells]) + " |"


def _told(column: Told, chapter: Chapter | None) -> str:
    row = chapter.row(column.row) if chapter is not None else None
    if row is None:
        return "–"
    if column.scale and row.seconds is not None:
        return f"{row.seconds.over(column.scale).median:.3g}"
    ratio = row.cpu_ratio or row.ratio
    return f"× {ratio.show(2)}" if ratio is not None else "–"


def append(path: Path, row: str) -> None:
    """Write a row under the last one of the history in a file; one that has no such table gets it at its end."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if HEAD not in lines:
        lines += [*([""] if lines else []), HEAD, RULE]
    last = lines.index(HEAD)
    while last + 1 < len(lines) and lines[last + 1].startswith("|"):
        last += 1
    lines.insert(last + 1, row)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

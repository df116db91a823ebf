"""The atlas as people read it: paths that fail alike share a line, columns in which nothing happens are left out.

    trl 1.16.0 · 28 paths · a fault at a masked token
              policy             old
              −inf NaN  +200     −inf NaN  +200
      grpo;  dapo;  bnpo;  dr_grpo;  luspo
        A>0   ·    LM   M        M    LM   M
        A<0   ·    LM   LM       LM   LM   LM

First plain data (`Sheet`, one per framework, and the sentences to take away), then a terminal or a page around it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.atlas.cells import Atlas
from nanscope.atlas.faults import SHORT, Fault, Kind, Where
from nanscope.atlas.harm import GRADIENT, LEGEND, Harm
from nanscope.atlas.verification import Verification
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.paths import LossPath
from nanscope.report.console import HARM, QUIET, STRONG, WIDTH
from nanscope.snapshot.files import write_whole


@dataclass(frozen=True, slots=True)
class Column:
    """Faults that differ only in the sign of A. plus, minus: their places in a row of cells, alike where the sign is not varied."""

    group: str
    head: str
    sets: str
    plus: int
    minus: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """Paths that answer alike. plus, minus: what happens with A > 0 and with A < 0, column by column."""

    names: tuple[str, ...]
    plus: tuple[Harm, ...]
    minus: tuple[Harm, ...]

    @property
    def clean(self) -> bool:
        """Return whether nothing happens."""
        return not any(self.plus + self.minus)


@dataclass(frozen=True, slots=True)
class Block:
    """The faults of one place. columns: those in which something happens; without any, all paths are clean."""

    title: str
    columns: tuple[Column, ...]
    patterns: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A framework. version: the one that its rows were read in."""

    framework: str
    version: str
    paths: int
    blocks: tuple[Block, ...]


_BLOCKS = (
    ("a fault at a masked token", (Where.MASKED,)),
    ("a fault at a counted token", (Where.VALID,)),
    ("no valid token", (Where.ROW, Where.BATCH)),
)


def sheets(atlas: Atlas) -> tuple[Sheet, ...]:
    """Return the atlas framework by framework."""
    found = []
    for framework in dict.fromkeys(path.framework for path in atlas.paths):
        rows = [(_shown_name(path), row) for path, row in zip(atlas.paths, atlas.cells, strict=True) if path.framework == framework]
        version = next(LOSSES[path.key].version for path in atlas.paths if path.framework == framework)
        blocks = tuple(_block(title, _columns(atlas.faults, places), rows) for title, places in _BLOCKS)
        found.append(Sheet(framework, version, len(rows), blocks))
    return tuple(found)


def _shown_name(path: LossPath) -> str:
    """Return the name within its framework; † where the framework has no such setting."""
    return path.name.partition(".")[2] + (" †" if path.supposed else "")


def _columns(faults: Sequence[Fault], places: Sequence[Where]) -> Iterator[Column]:
    at = {fault: position for position, fault in enumerate(faults)}
    for fault, position in at.items():
        if fault.where in places and fault.advantage >= 0:
            opposite = Fault(fault.tensor, fault.kind, fault.where, -1)
            minus = at.get(opposite, position) if fault.advantage else position
            yield Column(_group(fault), str(fault.where if fault.kind is Kind.EMPTY else fault.kind), fault.sets, position, minus)


def _group(fault: Fault) -> str:
    if fault.kind is Kind.EMPTY:
        return "empty"
    return "A=0" if fault.advantage == 0 else SHORT[fault.tensor]


def _block(title: str, columns: Iterable[Column], rows: Sequence[tuple[str, Sequence[Harm]]]) -> Block:
    live = tuple(column for column in columns if any(row[column.plus] or row[column.minus] for _, row in rows))
    alike: dict[tuple[tuple[Harm, ...], tuple[Harm, ...]], list[str]] = {}
    for name, row in rows:
        cells = (tuple(row[column.plus] for column in live), tuple(row[column.minus] for column in live))
        alike.setdefault(cells, []).append(name)
    return Block(title, live, tuple(Pattern(tuple(names), *cells) for cells, names in alike.items()))


COLUMNS = (
    "A column is one value in one tensor: −inf, NaN, or what makes the log-ratio +200 or −200 (policy − old, ref − policy, old − rollout).",
    "A=0: an old log-prob that makes the log-ratio +200, in a row with advantage 0. row, batch: a row or a batch without a valid token.",
    "A row has three counted tokens: the mean of a log-ratio of 200 over it is 67, which exp survives.",
    "†: a clamp that the framework does not have; nanscope adds it to show what it would do.",
    "Paths that answer alike share a line. Columns in which nothing happens on any path of a framework are left out.",
)

_LOOK_OF_LETTER = {"·": "clean", "L": "loud", "V": "silent", "M": "silent", "≠": "changed"}


def _look(harm: Harm) -> str:
    """Return how a cell stands out: what no curve shows the most."""
    if not harm:
        return "clean"
    return "changed" if harm is Harm.CHANGED else "silent" if harm.silent else "loud"


def takeaways(atlas: Atlas) -> tuple[str, ...]:
    """Return in plain words, counted in this atlas, what a tired reader should know; fewer sentences where there is nothing to count."""
    real, supposed = _part(atlas, supposed=False), _part(atlas, supposed=True)
    told = (_overflow(real), _clamps(supposed), _masked(real), _swallowed(real), _empty(real))
    return tuple(sentence for sentence in told if sentence)


def _part(atlas: Atlas, *, supposed: bool) -> Atlas:
    """Return the paths that the frameworks have, or those that have a clamp from nanscope."""
    rows = [(path, row) for path, row in zip(atlas.paths, atlas.cells, strict=True) if path.supposed == supposed]
    return Atlas(tuple(path for path, _ in rows), atlas.faults, tuple(row for _, row in rows))


def _overflow(atlas: Atlas) -> str:
    """What the first fault to think of does: the log-ratio of a masked token overflows."""
    faults = [Fault("old_log_probs", Kind.PLUS, Where.MASKED, sign) for sign in (1, -1)]
    bad = _paths(atlas, faults, lambda harm: bool(harm & GRADIENT))
    silent = _paths(atlas, faults, lambda harm: harm.silent)
    total = len(atlas.paths)
    if not total or not set(faults) <= set(atlas.faults):
        return ""
    if not bad:
        return f"A log-ratio of +200 at a masked token leaves every gradient finite on {_of_all(total)}."
    return (
        f"A log-ratio of +200 at a masked token leaves the gradient finite on {total - len(bad)} of {_count(total)} and puts NaN into it "
        f"on {len(bad)} ({_shares(atlas, bad)}). {_of_these(len(silent), len(bad))} the loss is finite for one sign of the "
        "advantage at least: no curve shows it, and the next optimizer step makes every weight NaN."
    )


def _clamps(supposed: Atlas) -> str:
    """What a clamp of the log-ratio would do about it, in either order."""
    faults = [fault for fault in supposed.faults if fault.kind is Kind.PLUS and fault.tensor in ("log_probs", "old_log_probs")]
    bad = _paths(supposed, faults, lambda harm: bool(harm & GRADIENT))
    late = [path.name for path in supposed.paths if dict(path.settings).get("clamp_after_exp")]
    early = [path.name for path in supposed.paths if path.name not in late]
    if not faults or not early or not late:
        return ""
    return (
        f"With a clamp of ±20 nats on the log-ratio before exp, {sum(name not in bad for name in early)} of {len(early)} such paths (†) "
        f"keep every gradient finite at +200; with the same clamp after exp, {sum(name not in bad for name in late)} of {len(late)}."
    )


def _masked(atlas: Atlas) -> str:
    """Who is immune at masked tokens."""
    faults = [fault for fault in atlas.faults if fault.where is Where.MASKED and fault.tensor != "entropy"]
    bad = _paths(atlas, faults, bool)
    harmed = {name.split(".")[0] for name in bad}
    immune = [name for name in dict.fromkeys(path.framework for path in atlas.paths) if name not in harmed]
    if not faults or not immune:
        return ""
    return f"Nothing at a masked token reaches the loss or a gradient of {_listed(immune)}."


def _swallowed(atlas: Atlas) -> str:
    """Where a NaN vanishes."""
    faults = [fault for fault in atlas.faults if fault.where is Where.VALID and fault.kind is Kind.NAN]
    hidden = _paths(atlas, faults, lambda harm: harm is Harm.CHANGED)
    if not hidden:
        return ""
    return (
        f"On {len(hidden)} of {_count(len(atlas.paths))} a NaN at a counted token can vanish (≠): "
        "loss and gradients are finite, and the token is trained on a wrong number or not at all."
    )


def _empty(atlas: Atlas) -> str:
    """What a batch without a valid token does."""
    faults = [fault for fault in atlas.faults if fault.where is Where.BATCH]
    bad = _paths(atlas, faults, lambda harm: Harm.LOSS in harm)
    return f"A batch without a valid token makes the loss NaN on {_count(len(bad))} ({_shares(atlas, bad)})." if bad else ""


def _paths(atlas: Atlas, faults: Iterable[Fault], harmed: Callable[[Harm], bool]) -> list[str]:
    """Return the names of the paths that one of the faults harms in this way."""
    places = [atlas.faults.index(fault) for fault in faults if fault in atlas.faults]
    return [path.name for path, row in zip(atlas.paths, atlas.cells, strict=True) if any(harmed(row[place]) for place in places)]


def _shares(atlas: Atlas, names: Sequence[str]) -> str:
    """`trl 21 of 28, liger 17 of 21`."""
    totals: dict[str, int] = {}
    for path in atlas.paths:
        totals[path.framework] = totals.get(path.framework, 0) + 1
    counts = {framework: sum(name.startswith(f"{framework}.") for name in names) for framework in totals}
    return ", ".join(f"{framework} {count} of {totals[framework]}" for framework, count in counts.items() if count)


def _count(number: int) -> str:
    return f"{number} path" if number == 1 else f"{number} paths"


def _of_all(number: int) -> str:
    return "the one path" if number == 1 else f"all {number} paths"


def _of_these(some: int, number: int) -> str:
    return ("There" if number == 1 else "On all of these") if some == number else f"On {some} of these"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


_MARGIN = "      "  # before the cells
_SIGNS = ("  A>0 ", "  A<0 ")
_STYLES = {"clean": QUIET, "changed": "yellow", "loud": "red", "silent": HARM}


def print_atlas(atlas: Atlas, verification: Verification | None = None, *, file: IO[str]) -> None:
    """Print the atlas, and what verifying it gave."""
    _print(_shown(atlas, verification), file)


def print_verification(verification: Verification, *, file: IO[str]) -> None:
    """Print how the atlas compares with the installed frameworks."""
    _print(_verification(verification), file)


def render_text(atlas: Atlas, verification: Verification | None = None) -> str:
    """Return the atlas as plain text."""
    return _plain(_shown(atlas, verification))


def _print(shown: RenderableType, file: IO[str]) -> None:
    if file.isatty():
        Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=False).print(shown)
    else:
        file.write(_plain(shown))


def _plain(shown: RenderableType) -> str:
    stream = StringIO()
    Console(file=stream, width=WIDTH, highlight=False, markup=False, emoji=False, no_color=True, force_terminal=False).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _shown(atlas: Atlas, verification: Verification | None) -> RenderableType:
    return _atlas(atlas) if verification is None else Group(_atlas(atlas), _verification(verification))


def _atlas(atlas: Atlas) -> RenderableType:
    parts: list[RenderableType] = [*_legend(), Text("")]
    for sheet in sheets(atlas):
        for block in sheet.blocks:
            parts += [*_drawn(sheet, block), Text("")]
    parts += [Padding(Text(sentence), (0, 2, 1, 2)) for sentence in takeaways(atlas)]
    return Group(*parts)


def _legend() -> Iterator[RenderableType]:
    codes = Table.grid(padding=(0, 2))
    for code, words in LEGEND.items():
        codes.add_row(Text(code, _STYLES[_LOOK_OF_LETTER[code]]), Text(words, QUIET))
    yield Padding(codes, (0, 2))
    for words in COLUMNS:
        yield Padding(Text(words, QUIET), (0, 2))


def _drawn(sheet: Sheet, block: Block) -> Iterator[RenderableType]:
    heading = Text.assemble((f"{sheet.framework} {sheet.version}", STRONG), (f" · {_count(sheet.paths)} · ", QUIET), (block.title, STRONG))
    if not block.columns:
        yield heading.append(": all clean", "green")
        return
    widths = _widths(block)
    yield heading
    yield _heads(block.columns, widths)
    for pattern in block.patterns:
        if pattern.clean:
            continue
        yield _Names(pattern.names)
        if pattern.plus == pattern.minus:
            yield _line(_MARGIN, pattern.plus, widths)
        else:
            yield _line(_SIGNS[0], pattern.plus, widths)
            yield _line(_SIGNS[1], pattern.minus, widths)
    for pattern in block.patterns:
        if pattern.clean:
            yield _Names(pattern.names, "clean: ")


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of paths, broken between them and not inside them where that is possible."""

    names: tuple[str, ...]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = ", ".join(name.replace(" ", "\0") for name in self.names)
        lines = _wrapped(self.title + text, options.max_width, "  ", "  ").splitlines()
        wide = (_wrapped(line.replace("\0", " "), options.max_width, "", "      ") for line in lines)
        yield Text("\n".join(wide), "green" if self.title else "")


def _wrapped(text: str, width: int, first: str, others: str) -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False)


def _widths(block: Block) -> list[int]:
    """Return how wide each column is: its head, its cells, and under a long name of a group the last one a little more."""
    rows = [cells for pattern in block.patterns for cells in (pattern.plus, pattern.minus)]
    widths = [1 + max(len(column.head), *(len(row[at].code) for row in rows)) for at, column in enumerate(block.columns)]
    for group, _ in _spans(block.columns):
        inside = [at for at, column in enumerate(block.columns) if column.group == group]
        widths[inside[-1]] += 1 + max(0, len(group) - sum(widths[at] for at in inside))
    return widths


def _heads(columns: Sequence[Column], widths: Sequence[int]) -> Text:
    """Two lines: groups over the first of their columns, and kinds."""
    groups, kinds = _MARGIN, _MARGIN
    for column, width in zip(columns, widths, strict=True):
        first = groups.strip() == "" or not groups.rstrip().endswith(column.group)
        groups = groups.ljust(len(kinds)) + (column.group if first else "")
        kinds += column.head.ljust(width)
    return Text(f"{groups.rstrip()}\n{kinds.rstrip()}", QUIET)


def _line(margin: str, cells: Sequence[Harm], widths: Sequence[int]) -> Text:
    text = Text(margin, QUIET)
    for harm, width in zip(cells, widths, strict=True):
        text.append(harm.code.ljust(width), _STYLES[_look(harm)])
    return text


def _verification(verification: Verification) -> RenderableType:
    parts: list[RenderableType] = [Text("against the frameworks themselves", STRONG)]
    parts += [Padding(Text(words), (0, 2)) for words in verification_words(verification)]
    return Group(*parts)


def verification_words(verification: Verification) -> Iterator[str]:
    """Yield what was compared, every disagreement, and what could not be compared."""
    for one in verification.compared:
        read = "" if one.version == one.known else f" (nanscope's rows were read in {one.known})"
        yield f"{one.framework} {one.version}: {one.cells} cells of {_count(one.paths)} compared{read}"
    if verification.compared:
        number = len(verification.disagreements)
        yield f"{number} {'cell disagrees' if number == 1 else 'cells disagree'}" + (":" if number else "")
    for d in verification.disagreements:
        yield f"✗ {d.path.name} | {d.fault.name} | nanscope {d.ours.code} | {d.path.framework} {d.theirs.code}"
    refused: dict[tuple[str, str], list[str]] = {}
    for path, fault, why in verification.refused:
        refused.setdefault((why, fault.name), []).append(path.name)
    for (why, fault_name), names in refused.items():
        yield f"not compared, {fault_name}: {', '.join(names)} stop by themselves: {why}"
    for path, why in verification.unreached:
        yield f"not compared: {path.name}: {why}"
    if verification.absent:
        yield f"not installed here, or without an adapter: {', '.join(verification.absent)}"


def render_atlas(atlas: Atlas, path: Path, verification: Verification | None = None) -> None:
    """Write the atlas; the suffix chooses the form, and a reader never sees half a file.

    Raises NanscopeError for a suffix that no renderer has, OSError if the file cannot be written.
    """
    check_suffix(path)
    write_whole(path, _RENDERERS[path.suffix.lower()](atlas, verification).encode())


def check_suffix(path: Path) -> None:
    """Raise NanscopeError if no renderer has the suffix of a file."""
    if path.suffix.lower() not in _RENDERERS:
        message = f"no renderer for {path.suffix or path.name!r}; known are {', '.join(_RENDERERS)}"
        raise NanscopeError(message, slug="unknown-format")


def render_json(atlas: Atlas, verification: Verification | None = None) -> str:
    """Return the atlas as JSON, with the sentences and, if it was verified, with what that gave."""
    data = atlas.to_json() | {"takeaways": takeaways(atlas)}
    if verification is not None:
        data["verification"] = verification.to_json()
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def render_html(atlas: Atlas, verification: Verification | None = None) -> str:
    """Return the atlas as one self-contained page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from nanscope.version import __version__

    here = resources.files("nanscope.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    css = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "atlas.css"))
    template = environment.from_string(here.joinpath("atlas.html").read_text(encoding="utf-8"))
    return template.render(
        css=Markup(css),
        version=__version__,
        paths=len(atlas.paths),
        cells=sum(len(row) for row in atlas.cells),
        legend=[(code, words, _LOOK_OF_LETTER[code]) for code, words in LEGEND.items()],
        columns=COLUMNS,
        sentences=takeaways(atlas),
        sheets=[(sheet, [(block, _spans(block.columns), list(_rows(block))) for block in sheet.blocks]) for sheet in sheets(atlas)],
        verified=list(verification_words(verification)) if verification is not None else [],
    )


def _spans(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Groups with how many columns each has."""
    names = dict.fromkeys(column.group for column in columns)
    return [(name, sum(column.group == name for column in columns)) for name in names]


def _rows(block: Block) -> Iterator[tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    """Yield (names, each as key and settings; cells, each as text and look)."""
    for pattern in block.patterns:
        names = [name.partition(" · ") for name in pattern.names]
        cells = [_cell(plus, minus) for plus, minus in zip(pattern.plus, pattern.minus, strict=True)]
        yield [(key, settings) for key, _, settings in names], cells


def _cell(plus: Harm, minus: Harm) -> tuple[str, str]:
    """Return text and look: the worse of the two signs, and silent is the worst."""
    text = plus.code if plus == minus else f"{plus.code}/{minus.code}"
    looks = {_look(plus), _look(minus)}
    return text, next(look for look in ("silent", "loud", "changed", "clean") if look in looks)


_RENDERERS: dict[str, Callable[[Atlas, Verification | None], str]] = {".html": render_html, ".txt": render_text, ".json": render_json}

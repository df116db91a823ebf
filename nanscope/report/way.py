"""The way from the origin to the harm, each link with the line of source that it stands for, ready to be stepped along."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from nanscope.report.chain import ChainItem, chain_of
from nanscope.report.clean import Limits, clean
from nanscope.report.origin import where_in
from nanscope.snapshot.observation import Origin
from nanscope.verdict.incident import Incident

AROUND, BESIDE = 7, 2  # lines kept around the origin, and around a link


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source. before, hit, after: the marked expression within it. anchor: of the line in the page, "" if no link stands there.

    number: "" where lines are left out.
    """

    number: str
    before: str
    hit: str
    after: str
    marked: bool
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines of one file. title: what it is called, and where in it the origin is."""

    title: str
    lines: tuple[SourceLine, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """A link of the chain. anchor: of its line in the page, "" if that is not shown."""

    item: ChainItem
    anchor: str


@dataclass(frozen=True, slots=True)
class Way:
    """The listings, that of the origin first, and the chain."""

    listings: tuple[Listing, ...]
    stops: tuple[Stop, ...]


def way_of(incident: Incident, limits: Limits, index: int) -> Way:
    """Return the way of an incident. index: its number in the page."""
    place = incident.origin
    items = list(chain_of(incident, limits.chain, limits.text))
    files = {file: dict(lines) for file, lines in incident.lines}
    if place.source:
        files = {place.file or "": files.pop(place.file or "", {}) | dict(place.source)} | files
    spots = dict.fromkeys(item.at for item in items if item.at is not None and item.at[0] in files)
    anchors = {spot: f"line-{index}-{n}" for n, spot in enumerate(spots, 1)}
    listed = (_listing(file, sorted(lines.items()), place, anchors, limits) for file, lines in files.items())
    listings = [listing for listing in listed if listing.lines]
    shown = {line.anchor for listing in listings for line in listing.lines}
    stops = tuple(Stop(item, anchor if (anchor := anchors.get(item.at, "") if item.at else "") in shown else "") for item in items)
    return Way(tuple(listings), stops)


def source_lines(place: Origin, limits: Limits) -> tuple[SourceLine, ...]:
    """Return the lines around an origin, its own marked."""
    return _listing(place.file or "", place.source, place, {}, limits).lines


def _listing(file: str, lines: Sequence[tuple[int, str]], place: Origin, anchors: dict[tuple[str, int], str], limits: Limits) -> Listing:
    linked = {spot[1] for spot in anchors if spot[0] == file}
    own = place.line if (place.file or "") == file else None
    kept = [
        (number, text)
        for number, text in lines
        if (own is not None and abs(number - own) <= AROUND) or any(abs(number - line) <= BESIDE for line in linked)
    ]
    title = where_in(place, limits.text) if own is not None else clean(PurePath(file).name, limits.text)
    return Listing(title, tuple(_lines(kept[: 4 * limits.items], own, place, {line: anchors[file, line] for line in linked}, limits)))


def _lines(
    lines: Sequence[tuple[int, str]], own: int | None, place: Origin, anchors: dict[int, str], limits: Limits
) -> Iterator[SourceLine]:
    """The lines without empty ends, the origin's expression marked; where some are left out, a line that says so."""
    wanted = re.escape(clean((place.variable if place.op == "input" else place.expression) or "", limits.text))
    filled = [n for n, (_, text) in enumerate(lines) if str(text).strip()]
    last: int | None = None
    for number, text in lines[filled[0] : filled[-1] + 1] if filled else ():
        if last is not None and number != last + 1:
            yield SourceLine("", "⋯", "", "", False)
        last = number
        words = clean(str(text).expandtabs(4).rstrip(), limits.text)
        marked = number == own
        found = re.search(rf"(?<!\w){wanted}(?!\w)", words) if marked and wanted else None
        start, end = found.span() if found else (len(words), len(words))
        yield SourceLine(clean(number, 12), words[:start], words[start:end], words[end:], marked, anchors.get(number, ""))

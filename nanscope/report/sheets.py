"""The atlas as plain data: paths that fail alike share a line, columns in which nothing happens are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nanscope.atlas.cells import Atlas
from nanscope.atlas.faults import SHORT, Fault, FaultKind, Where
from nanscope.atlas.harm import Harm
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.paths import LossPath


@dataclass(frozen=True, slots=True)
class Column:
    """Faults that differ only in the sign of A. plus, minus: their places in a row of cells, alike where the sign is not varied."""

    group: str
    head: str
    sets: str
    plus: int
    minus: int


@dataclass(frozen=True, slots=True)
class Alike:
    """Paths that answer alike. plus, minus: what happens with A > 0 and with A < 0, column by column."""

    names: tuple[str, ...]
    plus: tuple[Harm, ...]
    minus: tuple[Harm, ...]

    @property
    def clean(self) -> bool:
        """Return whether nothing happens."""
        return not any(self.plus + self.minus)


@dataclass(frozen=True, slots=True)
class FaultBlock:
    """The faults of one place. columns: those in which something happens; without any, all paths are clean."""

    title: str
    columns: tuple[Column, ...]
    patterns: tuple[Alike, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A framework. version: the one that its rows were read in."""

    framework: str
    version: str
    paths: int
    blocks: tuple[FaultBlock, ...]


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
            yield Column(_group(fault), str(fault.where if fault.kind is FaultKind.EMPTY else fault.kind), fault.sets, position, minus)


def _group(fault: Fault) -> str:
    if fault.kind is FaultKind.EMPTY:
        return "empty"
    return "A=0" if fault.advantage == 0 else SHORT[fault.tensor]


def _block(title: str, columns: Iterable[Column], rows: Sequence[tuple[str, Sequence[Harm]]]) -> FaultBlock:
    live = tuple(column for column in columns if any(row[column.plus] or row[column.minus] for _, row in rows))
    alike: dict[tuple[tuple[Harm, ...], tuple[Harm, ...]], list[str]] = {}
    for name, row in rows:
        cells = (tuple(row[column.plus] for column in live), tuple(row[column.minus] for column in live))
        alike.setdefault(cells, []).append(name)
    return FaultBlock(title, live, tuple(Alike(tuple(names), *cells) for cells, names in alike.items()))


def spans(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return the groups with how many columns each has."""
    names = dict.fromkeys(column.group for column in columns)
    return [(name, sum(column.group == name for column in columns)) for name in names]


def look(harm: Harm) -> str:
    """Return how a cell stands out: what no curve shows the most."""
    if not harm:
        return "clean"
    return "changed" if harm is Harm.CHANGED else "silent" if harm.silent else "loud"

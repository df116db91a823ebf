"""The fix as lines of a diff, for all renderers.

train.py:47
- ratio = torch.exp(log_ratio)
+ ratio = torch.exp(log_ratio.masked_fill(mask == 0, 0.0))
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import PurePath

from nanscope.report.clean import WHOLE, clean
from nanscope.report.tried import best_of
from nanscope.snapshot.observation import Diff
from nanscope.verdict.incident import Fix, Incident

TAB = 4
NO_DIFF = "no diff of it can be written; the next best has one"
NO_DIFF_AT_ALL = "no diff of it"
HOMES = ("home", "Users")  # in which there is a folder a person


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a diff. sign: "-", "+", or " " for one that stays. number: in the source as it is, "" of a line that is not there yet."""

    sign: str
    number: str
    text: str


@dataclass(frozen=True, slots=True)
class Hunk:
    """One place. where: file and line; file: what it is called; path: which it is."""

    where: str
    file: str
    path: str
    first: int
    lines: tuple[DiffLine, ...]


def written_fix(incident: Incident) -> Fix | None:
    """Return the best fix if its change of the source is known, else the next proven one of which it is, else one of which a part is; None
    if there is none."""
    best = best_of(incident)
    known = [fix for fix in (best, *incident.fixes) if fix is not None and fix.executed and fix.proven and fix.diffs]
    return min(known, key=lambda fix: bool(fix.rest), default=None)


def unmeasured_fix(incident: Incident) -> Fix | None:
    """Return, where no fix is proven, the first that heals at no known cost and whose change of the source is known: nothing healthy was
    left to measure it by. None if there is none."""
    if best_of(incident) is not None:
        return None
    healing = (fix for fix in incident.fixes if fix.executed and fix.works and fix.distortion is None and not fix.cost)
    return next((fix for fix in healing if fix.diffs and not fix.rest), None)


def rest_of(fix: Fix | None, limit: int = WHOLE.text) -> tuple[str, ...]:
    """Return in words what a fix does at places of which no change of the source is known, beside those of which it is."""
    return () if fix is None else tuple(clean(words, limit) for words in fix.rest)


def hunks_of(fix: Fix | None, limit: int = WHOLE.text) -> tuple[Hunk, ...]:
    """Return a fix as hunks, () where its change of the source is not known."""
    diffs = () if fix is None else fix.diffs
    names = _names({diff.file for diff in diffs})
    return tuple(_hunk(diff, names[diff.file], limit) for diff in diffs)


def _names(files: Collection[str]) -> dict[str, str]:
    """What files are called in one patch: as from the folder that has them all in it, but for a folder of the machine's, and two of one
    name by as much of their folders as tells them apart."""
    parts = {file: PurePath(os.path.normpath(file)).parts for file in files}
    levels = zip(*(names[:-1] for names in parts.values()), strict=False)
    common = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    inside = all(common >= max(2, _own(names)) and ".." not in names for names in parts.values())
    return {file: clean("/".join(names[common:] if inside else _told_apart(names, parts.values())), 240) for file, names in parts.items()}


def _own(names: tuple[str, ...]) -> int:
    """How many parts of a path say nothing but where it begins: `/`, `/home/user`."""
    return 3 if names[1:2] and names[1] in HOMES else names[:1].count("/")


def _told_apart(names: tuple[str, ...], others: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """The last parts of a path, as few as no other one ends in, and no home."""
    most = max(1, len(names) - _own(names))
    return next((names[-many:] for many in range(1, most) if sum(one[-many:] == names[-many:] for one in others) == 1), names[-most:])


def _hunk(diff: Diff, file: str, limit: int) -> Hunk:
    return Hunk(f"{file}:{clean(diff.line, 12)}", file, diff.file, diff.line - len(diff.above), tuple(_lines(diff, limit)))


def _lines(diff: Diff, limit: int) -> Iterator[DiffLine]:
    number = diff.line - len(diff.above)
    for sign, lines in ((" ", diff.above), ("-", diff.removed), ("+", diff.added), (" ", diff.below)):
        for line in lines:
            yield DiffLine(sign, "" if sign == "+" else clean(number, 12), "\t".join(clean(part, limit) for part in line.split("\t")))
            number += sign != "+"


def changed(hunk: Hunk) -> Iterator[DiffLine]:
    """Yield the lines that are not the same afterwards, without the indentation that they share, and the line before which one is put."""
    shown = [replace(line, text=line.text.expandtabs(TAB)) for line in hunk.lines]
    lines = [line for line in shown if line.sign != " "]
    if all(line.sign == "+" for line in lines):
        lines += shown[shown.index(lines[-1]) + 1 :][:1]
    indent = min((len(line.text) - len(line.text.lstrip()) for line in lines if line.text.strip()), default=0)
    for line in lines:
        yield DiffLine(line.sign, line.number, line.text[indent:].rstrip())


def unified(fix: Fix | None) -> str:
    """Return a fix as a unified diff, which `patch` takes in the folder of its files; "" where its change of the source is not known."""
    return "".join(f"{line.sign.strip(HEAD)}{line.text}\n" for line in patch_of(fix))


HEAD = "@"  # the sign of a line that says where


def patch_of(fix: Fix | None) -> Iterator[DiffLine]:
    """Yield the lines of a unified diff, those that say where with a sign of their own. Changes that share lines around them are one."""
    named, grown = "", 0
    for hunk in _joined(hunks_of(fix)):
        if hunk.path != named:
            named, grown = hunk.path, 0
            end = "\t" if " " in hunk.file else ""  # else `patch` takes the first word for the name
            yield from (DiffLine(HEAD, "", f"{sign} {hunk.file}{end}") for sign in ("---", "+++"))
        old, new = _old(hunk), sum(line.sign != "-" for line in hunk.lines)
        yield DiffLine(HEAD, "", f"@@ -{hunk.first},{old} +{hunk.first + grown},{new} @@")
        grown += new - old
        yield from hunk.lines


def _joined(hunks: Iterable[Hunk]) -> Iterator[Hunk]:
    """The hunks, those as one that share lines around them: `patch` looks for the lines as they were before any change."""
    last: Hunk | None = None
    for hunk in hunks:
        both = _both(last, hunk) if last is not None and last.path == hunk.path else None
        if last is not None and both is None:
            yield last
        last = both or hunk
    if last is not None:
        yield last


def _both(one: Hunk, other: Hunk) -> Hunk | None:
    """Two hunks as one, None where there is a line between them that neither has."""
    after, before = _staying(reversed(one.lines)), _staying(other.lines)
    end, begin = one.first + _old(one) - after, other.first + before  # the lines between the two changes
    between = dict(enumerate(one.lines[len(one.lines) - after :], end)) | dict(enumerate(other.lines[:before], other.first))
    if end > begin or any(number not in between for number in range(end, begin)):
        return None
    middle = (between[number] for number in range(end, begin))
    return replace(one, lines=(*one.lines[: len(one.lines) - after], *middle, *other.lines[before:]))


def _staying(lines: Iterable[DiffLine]) -> int:
    return sum(1 for _ in takewhile(lambda line: line.sign == " ", lines))


def _old(hunk: Hunk) -> int:
    return sum(line.sign != "+" for line in hunk.lines)

"""The fix as lines of a diff, for all renderers.

train.py:47
- ratio = torch.exp(log_ratio)
+ ratio = torch.exp(log_ratio.masked_fill(mask == 0, 0.0))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath

from nanscope.report.clean import WHOLE, clean
from nanscope.report.tried import best_of
from nanscope.snapshot.observation import Diff
from nanscope.verdict.incident import Fix, Incident

TAB = 4


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a diff. sign: "-", "+", or " " for one that stays. number: in the source as it is, "" of a line that is not there yet."""

    sign: str
    number: str
    text: str


@dataclass(frozen=True, slots=True)
class Hunk:
    """One place. where: file and line; file: its name."""

    where: str
    file: str
    first: int
    lines: tuple[DiffLine, ...]


def written_fix(incident: Incident) -> Fix | None:
    """Return the best fix if its change of the source is known, else the next proven one of which it is; None if there is none."""
    best = best_of(incident)
    if best is None:
        return None
    return next((fix for fix in (best, *incident.fixes) if fix.executed and fix.proven and fix.diffs), None)


def hunks_of(fix: Fix | None, limit: int = WHOLE.text) -> tuple[Hunk, ...]:
    """Return a fix as hunks, () where its change of the source is not known."""
    return () if fix is None else tuple(_hunk(diff, limit) for diff in fix.diffs)


def _hunk(diff: Diff, limit: int) -> Hunk:
    file = clean(PurePath(diff.file).name, 120)
    return Hunk(f"{file}:{clean(diff.line, 12)}", file, diff.line - len(diff.above), tuple(_lines(diff, limit)))


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


def unified(fix: Fix | None, limit: int = WHOLE.text) -> str:
    """Return a fix as a unified diff, which `patch` takes in the folder of the file; "" where its change of the source is not known."""
    return "".join(f"{line.sign.strip(HEAD)}{line.text}\n" for line in patch_of(fix, limit))


HEAD = "@"  # the sign of a line that says where


def patch_of(fix: Fix | None, limit: int = WHOLE.text) -> Iterator[DiffLine]:
    """Yield the lines of a unified diff, those that say where with a sign of their own."""
    named = ""
    for hunk in hunks_of(fix, limit):
        if hunk.file != named:
            named = hunk.file
            yield from (DiffLine(HEAD, "", f"{sign} {named}") for sign in ("---", "+++"))
        old = sum(line.sign != "+" for line in hunk.lines)
        new = sum(line.sign != "-" for line in hunk.lines)
        yield DiffLine(HEAD, "", f"@@ -{hunk.first},{old} +{hunk.first},{new} @@")
        yield from hunk.lines

"""Where an edited program goes wrong next: a step may have the same fault in two lines, or two faults.

An edit that helps and does not heal is made again where it fits the next origin; where it does not, another one is tried beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from nanscope.errors import NanscopeError
from nanscope.locate.location import locate
from nanscope.locate.trace import Trace
from nanscope.replay.patch import Patch, Variant
from nanscope.text import line_in

Edit: TypeAlias = Callable[[Patch], Variant | None]

UNMADE = (NanscopeError, RuntimeError, ValueError, IndexError, StopIteration)  # by which an edit says that it cannot be made here

ROUNDS = 3  # further places at which one edit is tried


@dataclass(frozen=True, slots=True)
class EditedPlace:
    """Where an edit acts. patch: the program without it; variant: with it there, and what it does there in words."""

    patch: Patch
    variant: Variant

    @property
    def words(self) -> str:
        """What is done where."""
        site = self.patch.origin.site
        where = f" ({line_in(site.file, site.line)})" if site is not None and site.file and site.line else ""
        return f"{self.variant.label}{where}"


def following(variant: Variant, known: Container[int]) -> Patch | None:
    """Return where an edited program goes wrong next; None if nowhere, or still at one of the origins that are known."""
    try:
        trace = Trace.of(variant.program, variant.tensors, lean=True)
        location = locate(trace)
    except UNMADE:
        return None
    return None if location is None or location.origin.value_id in known else Patch(trace, location.origin)


def everywhere(variant: Variant, edit: Edit, patch: Patch) -> tuple[Variant, Patch | None, tuple[EditedPlace, ...]]:
    """Make the same edit where the next origin is, if the first one uncovers another of its kind (`err_a` and `err_b` both overflow).

    Returns the program, where it goes wrong all the same, if that is another place than the first, and the further places of the edit.
    """
    seen, places = {patch.origin.value_id}, list[EditedPlace]()
    found = variant
    for _ in range(ROUNDS):
        there = following(found, seen)
        if there is None:
            return found, None, tuple(places)
        seen.add(there.origin.value_id)
        try:
            more = edit(there)
        except UNMADE:
            more = None
        if more is None:
            return found, there, tuple(places)
        places.append(EditedPlace(there, more))
        found = replace(more, label=f"{found.label}; {_again(variant, there, more)}")
    return found, following(found, seen), tuple(places)


def also_at(variant: Variant, edit: Edit, places: Iterable[EditedPlace]) -> Variant | None:
    """Make the same edit at further places of a program, those that another edit was made at; None where it cannot be made there."""
    for there in (place.patch for place in places):
        patch = there.edited(variant.program)
        if patch.origin.call is None and there.origin.call is not None:
            return None  # the other edit had put it in
        try:
            more = edit(patch)
        except UNMADE:
            return None
        if more is None:
            return None
        variant = replace(more, label=f"{variant.label}; {_again(variant, there, more)}")
    return variant


def beside(variant: Variant, there: Patch, edits: Mapping[str, Edit]) -> Iterator[tuple[Variant, EditedPlace]]:
    """Yield the program with each other edit where it goes wrong next, and that edit by itself."""
    for edit in edits.values():
        try:
            second = edit(there)
        except UNMADE:
            continue
        if second is not None:
            yield replace(second, id=variant.id, label=f"{variant.label}; and {_at(there)} {second.label}"), EditedPlace(there, second)


def then(there: Patch | None) -> str:
    """Where a program goes wrong next, in words."""
    return "" if there is None else f"{there.op or there.result} {_at(there)}"


def _again(first: Variant, there: Patch, more: Variant) -> str:
    """The same edit at a further place, in words: what is done there may be another thing, and is told then."""
    alike = first.label.split(maxsplit=1)[0] == more.label.split(maxsplit=1)[0]
    return f"the same {_at(there)}" if alike else f"and {_at(there)} {more.label}"


def _at(there: Patch) -> str:
    site = there.origin.site
    if site is None or not site.line:
        return "elsewhere"
    several = len({one.file for one in there.program.sites}) > 1
    return f"at {line_in(site.file, site.line)}" if several else f"at line {site.line}"

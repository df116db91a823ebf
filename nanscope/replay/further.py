"""Where an edited program goes wrong next: a step may have the same fault in two lines, or two faults.

An edit that helps and does not heal is made again where it fits the next origin; where it does not, another one is tried beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from nanscope.errors import NanscopeError
from nanscope.locate.location import locate
from nanscope.locate.trace import Trace
from nanscope.replay.patch import Patch, Variant

Edit: TypeAlias = Callable[[Patch], Variant | None]

UNMADE = (NanscopeError, RuntimeError, ValueError, IndexError, StopIteration)  # by which an edit says that it cannot be made here

ROUNDS = 3  # further places at which one edit is tried


def following(variant: Variant, known: Container[int]) -> Patch | None:
    """Return where an edited program goes wrong next; None if nowhere, or still at one of the origins that are known."""
    try:
        trace = Trace.of(variant.program, variant.tensors)
        location = locate(trace)
    except UNMADE:
        return None
    return None if location is None or location.origin.value_id in known else Patch(trace, location.origin)


def everywhere(variant: Variant, edit: Edit, patch: Patch) -> tuple[Variant, Patch | None]:
    """Make the same edit where the next origin is, if the first one uncovers another of its kind (`err_a` and `err_b` both overflow).

    Returns the program, and where it goes wrong all the same, if that is another place than the first.
    """
    seen = {patch.origin.value_id}
    found = variant
    for _ in range(ROUNDS):
        there = following(found, seen)
        if there is None:
            return found, None
        seen.add(there.origin.value_id)
        try:
            more = edit(there)
        except UNMADE:
            more = None
        if more is None:
            return found, there
        found = replace(more, label=f"{found.label}; the same {_at(there)}")
    return found, following(found, seen)


def beside(variant: Variant, there: Patch, edits: Mapping[str, Edit]) -> Iterator[Variant]:
    """Yield the program with each other edit where it goes wrong next."""
    for edit in edits.values():
        try:
            second = edit(there)
        except UNMADE:
            continue
        if second is not None:
            yield replace(second, id=variant.id, label=f"{variant.label}; and {_at(there)} {second.label}")


def then(there: Patch | None) -> str:
    """Where a program goes wrong next, in words."""
    return "" if there is None else f"{there.op or there.result} {_at(there)}"


def _at(there: Patch) -> str:
    site = there.origin.site
    return f"at line {site.line}" if site is not None and site.line else "elsewhere"

"""Delta debugging on the program: rows and tokens go, then calls, then numbers, as long as it fails alike.

Every candidate is run, so that an unsound one is only wasted. After each pass it is asked why the program fails: where that has become
another cause, or the fix does not mend it any more, the first edit that did it is taken back, and is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from nanscope.locate.names import Names
from nanscope.reproduce.alike import WORK, Case, Failed, Oracle, Reason
from nanscope.reproduce.cut import cut
from nanscope.reproduce.dimensions import Dimensions
from nanscope.reproduce.shorten import ENDLESS, Edit, essential, shortcuts, written
from nanscope.reproduce.simplify import draws, simplifications
from nanscope.text import unravel

LARGE = 1 << 17  # elements of the leaves, from which on a replay waits until there are fewer
TAKEN_BACK = 12  # edits of one pass, at most
SWEEPS = 3
SHARES = (0.4, 0.55, 0.7, 0.75, 0.9, 0.95, 0.98, 1.0)  # of the work, that may be done by the end of each pass
PARTS = 32  # into which a dimension is taken apart, to leave out each


@dataclass(frozen=True, slots=True)
class Stand:
    """A case that fails alike, and how: where the shrinking stands."""

    case: Case
    failed: Failed


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest program that was found, how and why it fails."""

    case: Case
    failed: Failed
    why: Reason


Taken: TypeAlias = Callable[[str, Stand], None]  # notes an edit that was taken, and where it leads to
Pass: TypeAlias = Callable[[Oracle, Stand, Taken], Stand]


def shrunk(oracle: Oracle, case: Case, names: Names) -> Shrunk | None:
    """Shrink a program as far as it fails alike; None if it does not fail at all."""
    failed = oracle.run(case)
    if failed is None:
        return None
    oracle.wanted = failed.failure
    stand, oracle.work = Stand(case, failed), 0  # what the whole takes, it takes: the work is that of what is smaller
    plainly, plainer = _swept(essential, names), _swept(simplifications, names)
    oracle.limit = SHARES[0] * WORK
    if case.tokens >= LARGE:
        stand = _swept(written, names)(oracle, stand, _unheard)
        stand = _fewer(oracle, stand, _unheard)
    if len(case.program.calls) > ENDLESS:
        stand = plainly(oracle, stand, _unheard)
    wanted = why = oracle.why(stand.case)
    passes = (plainly, _fewer, _swept(shortcuts, names), _fewer, plainer, plainly, _fewer, _swept(draws, names))
    for step, share in zip(passes, SHARES, strict=True):
        oracle.limit = share * WORK
        stand, why = _kept_alike(oracle, stand, step, wanted, why)
    return Shrunk(stand.case, stand.failed, why)


def _unheard(key: str, after: Stand) -> None:
    """Nothing is taken back of what went before the first replay."""


def _kept_alike(oracle: Oracle, stand: Stand, step: Pass, wanted: Reason, why: Reason) -> tuple[Stand, Reason]:
    """Make a pass, without the edits after which the program fails for another reason."""
    for _ in range(TAKEN_BACK):
        taken: list[tuple[str, Stand]] = []
        end = step(oracle, stand, lambda key, after, taken=taken: taken.append((key, after)))  # type: ignore[misc]
        if not taken:
            break
        found = oracle.why(end.case)
        if found.like(wanted):
            return end, found
        good, bad = -1, len(taken) - 1
        while bad - good > 1:
            middle = (good + bad) // 2
            found = oracle.why(taken[middle][1].case)
            if found.like(wanted):
                good, why = middle, found
            else:
                bad = middle
        oracle.refused.add(taken[bad][0])
        if good >= 0:
            stand = taken[good][1]
    return stand, why


def _swept(edits: Callable[[Case, Failed, Names], Iterator[Edit]], names: Names) -> Pass:
    """A pass that tries edits in order, and after one that was taken those of what came of it, each once; and again, until none is."""

    def sweep(oracle: Oracle, stand: Stand, taken: Taken) -> Stand:
        for _ in range(SWEEPS):
            tried = set(oracle.refused)
            before = stand
            found: Stand | None = stand
            while found is not None:
                stand, found = found, None
                for key, make in edits(stand.case, stand.failed, names):
                    if key in tried or oracle.spent:
                        continue
                    tried.add(key)
                    case = make()
                    failed = None if case is None else oracle.alike(case)
                    if case is not None and failed is not None:
                        found = Stand(case, failed)
                        taken(key, found)
                        break
            if stand is before:
                break
        return stand

    return sweep


_Place: TypeAlias = tuple[int, int, int]  # a dimension, by where a leaf has it: leaf, place, which one of a product


def _fewer(oracle: Oracle, stand: Stand, taken: Taken) -> Stand:
    """Cut one dimension after another, the longest one first, down to the indices without which it does not fail alike."""
    seen: set[_Place] = set()
    while not oracle.spent:
        places = {place: size for place, size in _places(stand).items() if place not in seen}
        if not places:
            break
        place = max(places, key=lambda one: (places[one], -one[0], -one[1]))
        seen.add(place)
        stand = _cut_down(oracle, stand, place, taken)
    return stand


def _places(stand: Stand) -> dict[_Place, int]:
    """Where each dimension is first found, and how long it is."""
    dimensions = Dimensions(stand.case.program, stand.failed.trace.values)
    found: dict[int, _Place] = {}
    for leaf in stand.case.program.leaves:
        for place, label in enumerate(dimensions.of(leaf.id)):
            for position, atom in enumerate(label):
                found.setdefault(atom, (leaf.id, place, position))
    return {place: dimensions.size(atom) for atom, place in found.items() if dimensions.size(atom) > 1}


def _cut_down(oracle: Oracle, stand: Stand, place: _Place, taken: Taken) -> Stand:
    size, anchor = _anchored(stand, place)
    first = size // 2 if anchor is None else anchor
    for keep in ([first], [0] if anchor is None else [], *([first, other] for other in (first - 1, first + 1, 0, size - 1))):
        wanted = sorted({n for n in keep if 0 <= n < size})
        if 0 < len(wanted) < size and (found := _tried(oracle, stand, place, wanted, taken)) is not None:
            return found
    parts = 2
    while parts <= min(size, PARTS) and size > 1 and not oracle.spent:
        edges = [round(n * size / parts) for n in range(parts + 1)]
        for low, high in pairwise(edges):
            gone = set(range(low, high)) - ({anchor} if anchor is not None else set())
            keep = [n for n in range(size) if n not in gone]
            if gone and keep and (found := _tried(oracle, stand, place, keep, taken)) is not None:
                stand = found
                size, anchor = _anchored(stand, place)
                parts = max(parts - 1, 2)
                break
        else:
            parts *= 2
    return stand


def _anchored(stand: Stand, place: _Place) -> tuple[int, int | None]:
    """How long a dimension is, and which index of it the origin has; None if it has none."""
    program, values, origin = stand.case.program, stand.failed.trace.values, stand.failed.origin
    dimensions = Dimensions(program, values)
    labels = dimensions.of(place[0])
    if place[1] >= len(labels) or place[2] >= len(labels[place[1]]):
        return 1, None
    atom = labels[place[1]][place[2]]
    for index, label in zip(origin.index, dimensions.of(origin.value_id), strict=False):
        if atom in label:
            return dimensions.size(atom), unravel(index, [dimensions.size(one) for one in label])[label.index(atom)]
    return dimensions.size(atom), None


def _tried(oracle: Oracle, stand: Stand, place: _Place, keep: list[int], taken: Taken) -> Stand | None:
    values = stand.failed.trace.values
    dimensions = Dimensions(stand.case.program, values)
    atom = dimensions.of(place[0])[place[1]][place[2]]
    key = f"cut {place} {dimensions.size(atom)} {keep[:4]} {len(keep)} {keep[-1]}"
    if key in oracle.refused:
        return None
    whole = any(not tensor.is_floating_point() and tensor.dim() for tensor in stand.case.tensors.values())
    for renumber in (False, True) if whole else (False,):
        case = cut(stand.case, values, dimensions, atom, keep, renumber=renumber)
        failed = oracle.alike(case)
        if failed is not None:
            taken(key, found := Stand(case, failed))
            return found
    return None

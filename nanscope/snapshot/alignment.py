"""Which steps of several ranks are the same one, where each counts its own and the trainer drops some on one rank alone.

The ranks take their updates together: a number that a step was given and that no update came of is what they may differ by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def called_by(step: int, own: Sequence[int], other: Sequence[int]) -> int:
    """Return what another rank calls the step that this one calls `step`: one that it has not dropped is the update that came next.

    own, other: numbers of the steps that the trainers of the two have dropped, in order.
    """
    update = _update(step, own)
    alike = [dropped for dropped in other if _update(dropped, other) == update]
    before = sum(dropped < step for dropped in own if _update(dropped, own) == update)
    if step in own and before < len(alike):
        return alike[before]
    for dropped in other:
        update += dropped <= update
    return update


def dropped_alone(dropped: Mapping[int, Sequence[int]], updates: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Return which steps the trainer of a rank has dropped and not those of the others, by rank. updates: how many each rank has seen."""
    counts = {rank: Counter(_update(step, steps) for step in steps) for rank, steps in dropped.items()}
    least = min(updates.values(), default=0)  # what comes later the others may not have come to
    found: dict[int, tuple[int, ...]] = {}
    for rank, steps in dropped.items():
        before = Counter[int]()
        alone = []
        for step in steps:
            update = _update(step, steps)
            before[update] += 1
            if update <= least and before[update] > min(count[update] for count in counts.values()):
                alone.append(step)
        if alone:
            found[rank] = tuple(alone)
    return found


def _update(step: int, dropped: Sequence[int]) -> int:
    """Which update a step is, from 1; of one that was dropped, which would have come next."""
    return step - sum(one < step for one in dropped)

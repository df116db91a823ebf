"""Who of the ranks of a run was first, and who followed: told from what each says of itself in short, without its tensors.

first           7                  step 412        here
same step       0–6, 8–1021        step 412        by all-reduce
later           1022               step 413        through the weights
never heard of  1023
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.observation import Came
from nanscope.text import count, listed, spans


class Standing(StrEnum):
    """What became of a rank. NOT_ENDED: nothing bad is known of it, and it has not closed its run. UNHEARD: it left no file."""

    FIRST = "first"
    SAME_STEP = "same step"
    LATER = "later"
    HEALTHY = "healthy"
    NOT_ENDED = "not ended"
    UNHEARD = "never heard of"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks of one standing. steps: the first and the last of their first bad steps, None without one. came: how it came to them."""

    standing: Standing
    ranks: tuple[int, ...]
    steps: tuple[int, int] | None = None
    came: tuple[Came, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        steps = None if self.steps is None else list(self.steps)
        return {"standing": str(self.standing), "ranks": list(self.ranks), "steps": steps, "came": [str(came) for came in self.came]}

    @property
    def steps_words(self) -> str:
        """Return "step 412", "steps 413–415" or nothing."""
        if self.steps is None:
            return ""
        first, last = self.steps
        return f"step {first}" if first == last else f"steps {first}–{last}"

    @property
    def came_words(self) -> str:
        """How it came to them."""
        return listed([_CAME[came] for came in self.came])


_CAME = {
    Came.MADE: "made there",
    Came.EXCHANGED: "by what ranks put together for the loss",
    Came.REDUCED: "by all-reduce",
    Came.SCATTERED: "by reduce-scatter",
    Came.SENT: "sent by another stage",
    Came.WEIGHTS: "through the weights",
    Came.MODEL: "through the model",
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run, grouped. world: how many it has, 0 where nobody said."""

    world: int
    groups: tuple[RankGroup, ...]

    def of(self, standing: Standing) -> tuple[int, ...]:
        """Return the ranks of a standing."""
        return tuple(rank for group in self.groups if group.standing is standing for rank in group.ranks)

    @property
    def sentence(self) -> str:
        """Who was first, and what carried it to whom; "" where nothing went bad."""
        by = {group.standing: group for group in self.groups}
        first = by.get(Standing.FIRST)
        followed = [
            f"{count(len(group.ranks), 'rank')} {when}{f' ({group.came_words})' if group.came else ''}"
            for standing, when in ((Standing.SAME_STEP, "in the same step"), (Standing.LATER, "later"))
            if (group := by.get(standing)) is not None
        ]
        if first is None:
            return f"It reached {listed(followed)}; no rank says that it made it" if followed else ""
        of = f" of {self.world}" if self.world else ""
        name = (
            f"Rank {first.ranks[0]}{of} was first"
            if len(first.ranks) == 1
            else f"{len(first.ranks)}{of} ranks met it by themselves, rank {first.ranks[0]} is shown"
        )
        return f"{name}; {listed(followed)} followed" if followed else name

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"world": self.world, "groups": [group.to_json() for group in self.groups]}


def in_order(one: BadStep) -> tuple[int, int, int, int, int]:
    """Sort bad steps by this: of one step, who made the harm comes before whom it reached."""
    return one.step, one.update, _CLOSENESS[one.came], one.rank, one.part


def told_of(found: Iterable[BadStep]) -> list[BadStep]:
    """Return the bad steps of a run that are to be explained, in order: one of each cause, and after it a consequence on its rank.

    The others follow from these, or met the same at the same place in the same step.
    """
    ordered = sorted(found, key=in_order)
    causes = [one for one, follows in _followers(ordered) if not follows] or ordered[:1]
    seen: set[object] = set()
    told = []
    for one in causes:
        key = (one.step, one.update, one.part, one.came, one.site or (one.rank if one.came is Came.MADE else None))
        if key not in seen:
            seen.add(key)
            told += [one, *[other for other in ordered if other.rank == one.rank and other.of == one.step][:1]]
    return list(dict.fromkeys(told))


def groups_of(found: Iterable[BadStep], healthy: Iterable[int], not_ended: Iterable[int], world: int) -> Ranks:
    """Return who was first and who followed. found: the first bad steps of the ranks. healthy, not_ended: further ranks that wrote."""
    ordered = sorted(found, key=in_order)
    groups: dict[Standing, list[BadStep]] = {}
    known = set[int]()
    for one, follows in _followers(ordered):
        if one.rank not in known:
            known.add(one.rank)
            groups.setdefault(_standing(one, ordered[0], follows), []).append(one)
    told = [_group(standing, groups[standing]) for standing in Standing if standing in groups]
    rest: Mapping[Standing, Collection[int]] = {
        Standing.HEALTHY: (fine := set(healthy) - known),
        Standing.NOT_ENDED: (quiet := set(not_ended) - known - fine),
        Standing.UNHEARD: set(range(world)) - known - fine - quiet,
    }
    return Ranks(world, (*told, *(RankGroup(standing, tuple(sorted(ranks))) for standing, ranks in rest.items() if ranks)))


def _group(standing: Standing, found: Sequence[BadStep]) -> RankGroup:
    steps, came = [one.step for one in found], {one.came for one in found}
    return RankGroup(standing, tuple(sorted(one.rank for one in found)), (min(steps), max(steps)), tuple(c for c in Came if c in came))


def _standing(one: BadStep, first: BadStep, follows: bool) -> Standing:
    if (one.step, one.update) != (first.step, first.update):
        return Standing.LATER
    return Standing.SAME_STEP if follows or one.came.arrived else Standing.FIRST


_CLOSENESS = {
    came: number
    for number, came in enumerate((Came.MADE, Came.MODEL, Came.WEIGHTS, Came.EXCHANGED, Came.REDUCED, Came.SCATTERED, Came.SENT))
}  # to who made it


def _followers(ordered: Sequence[BadStep]) -> list[tuple[BadStep, bool]]:
    """Say of each bad step whether it follows from one before it in order.

    Weights that an update has spoilt reach whoever gathers them in the step after it, and from there on as long as steps stay bad.
    """
    began, reach = 0, -1  # the first and the last step of a row of bad ones that began with spoilt weights
    made = {(one.step, one.update) for one in ordered if not one.came.arrived}
    told = []
    for one in ordered:
        in_row = began < one.step <= reach + 1
        follows = one.of is not None or (one.came is not Came.MADE and in_row)
        follows |= one.came.arrived and (one.step, one.update) in made
        told.append((one, follows))
        if in_row and (follows or one.spoilt):
            reach = one.step
        elif one.spoilt:
            began = reach = one.step
    return told


def say_ranks(ranks: Collection[int], world: int = 0, shown: int = 8) -> str:
    """Return "rank 7 of 16", "ranks 0–6, 8–15 of 16"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {spans(sorted(ranks), shown)}{f' of {world}' if world > 1 else ''}"

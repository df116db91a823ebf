"""What a comparison says, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nanscope.plain import show


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors are apart.

    elements: that differ, of how many. largest: difference of two finite ones. relative: of it to the largest finite magnitude. index: of
    the first element that differs. a, b: its values. bad_a, bad_b: non-finite elements of each.
    """

    elements: int
    of: int
    largest: float
    relative: float
    index: tuple[int, ...]
    a: float
    b: float
    bad_a: int
    bad_b: int


@dataclass(frozen=True, slots=True)
class ComparedLeaf:
    """What came in under one name. apart: None where it is the same, bit by bit; note: why the two cannot be compared."""

    name: str
    role: str
    apart: Difference | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ComparedCall:
    """A call of both programs whose result is not the same.

    fed: what it read is not the same either; else it is born here, of the same numbers. settings: what the code gave, where that differs.
    """

    code: str
    op: str
    where: str
    fed: bool
    apart: Difference | None
    settings: str = ""


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One column of the histories, at the first step at which it differs. steps: that both have; differ: at how many of them."""

    name: str
    step: int
    a: float | str | None
    b: float | str | None
    differ: int
    steps: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two steps, or two runs.

    a, b: what they are called. loss_a, loss_b: of the steps. leaves: what came in, what differs first. calls: of both programs; alike: how
    many of them gave the same bits. first: the first call whose result differs. born: the first that differs on the same operands. parted:
    the first whose result is finite on one side only. only_a, only_b: calls that the other does not have. history: what of it differs.
    surroundings: settings and versions that differ, (name, a, b).
    """

    a: str
    b: str
    loss_a: float | None = None
    loss_b: float | None = None
    leaves: tuple[ComparedLeaf, ...] = ()
    calls: int = 0
    alike: int = 0
    first: ComparedCall | None = None
    born: ComparedCall | None = None
    parted: ComparedCall | None = None
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    history: tuple[ComparedStep, ...] = ()
    surroundings: tuple[tuple[str, str, str], ...] = ()

    @property
    def same(self) -> bool:
        """Is nothing different that was compared?"""
        differing = any(leaf.apart is not None or leaf.note for leaf in self.leaves)
        return not (differing or self.first or self.only_a or self.only_b or self.history or self.surroundings)

    @property
    def sentence(self) -> str:
        """Where they part, in a sentence."""
        if self.same:
            return f"{self.a} and {self.b} are the same: {self.calls} calls give the same bits" if self.calls else "no difference"
        if self.only_a or self.only_b:
            told = f"the two losses are not the same code: {len(self.only_a)} calls of {self.a} only, {len(self.only_b)} of {self.b} only"
        elif self.born is not None:
            told = f"{self.born.code} ({self.born.where}) is the first that differs on the same operands"
        elif self.first is not None:
            names = [leaf.name for leaf in self.leaves if leaf.apart is not None or leaf.note]
            told = f"what came in differs ({', '.join(names[:4])}), and {self.first.code} ({self.first.where}) is the first that it changes"
        elif any(leaf.apart is not None or leaf.note for leaf in self.leaves):
            told = "what came in differs, and no call's result does"
        elif self.history:
            at = min(self.history, key=lambda found: found.step)
            told = f"the runs part at step {at.step}: {at.name} {_words(at.a)} and {_words(at.b)}"
        else:
            told = "settings, versions or lengths differ, and nothing that was computed does"
        if self.parted is not None:
            told += f"; {self.parted.code} ({self.parted.where}) is finite on one side only"
        return told

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON data; non-finite numbers are text."""
        found: dict[str, Any] = show(asdict(self))
        return {"schema": 1, "same": self.same, "sentence": self.sentence, **found}


def _words(value: float | str | None) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

"""What a walk finds, as data of its program: the element where harm began, what it was made of, and what the harm crossed from there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanscope.locate.drops import Drop
from nanscope.program.calls import Leaf, Site
from nanscope.roles import Role
from nanscope.snapshot.observation import Phase

NUMBER = -1  # the id of no value


@dataclass(frozen=True, slots=True)
class Operand:
    """One element that the origin was computed from. value: the number; index: where it stands in its tensor. id: NUMBER for one that
    stands in the call itself. made: the expression that made its tensor."""

    id: int
    name: str | None
    role: Role | None
    index: tuple[int, ...]
    value: float
    made: str = ""


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a program, and what is known of it: the origin is the first harmful one.

    born: made here from finite operands; otherwise fed, it came in with a leaf.
    flat, index, shape: where it stands. value: what it is. masked: outside the loss, None where nothing selects.
    coefficient: name of an advantage or coefficient that is exactly 0 and multiplies the element.
    """

    value_id: int
    call: int | None
    op: str
    born: bool
    flat: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    value: float
    operands: tuple[Operand, ...]
    variable: str | None
    role: Role | None
    site: Site | None
    leaf: Leaf | None
    masked: bool | None
    drops: tuple[Drop, ...]
    coefficient: str | None

    @property
    def given(self) -> Operand | None:
        """Return the number of the code that made it NaN, None if none did."""
        return next((operand for operand in self.operands if operand.id == NUMBER and math.isnan(operand.value)), None)


@dataclass(frozen=True, slots=True)
class Crossing:
    """An element that the harm went through on its way from the origin. backward: the value is a gradient."""

    value_id: int
    op: str
    variable: str | None
    index: tuple[int, ...]
    value: float
    line: int | None
    backward: bool = False
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a program went wrong: phase, origin, and the chain from there to the harm.

    other: where another call made something bad that the harm came of, too, None if none did. met: which link of the chain is of both.
    """

    phase: Phase
    origin: Element
    chain: tuple[Crossing, ...]
    other: Crossing | None = None
    met: int = 0

"""A call as it came, which waits to be understood, and what else is to be done among such calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from nanscope.capture.entries import Operator
from nanscope.capture.sites import Place
from nanscope.program.joins import joins_many

Seen = tuple[int, int, tuple[int, ...], bool]  # of an argument: how often it was written to, address, shape, whether it wanted a gradient
Made = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # of a result: how often it was written to, address, shape, strides


class RawCall(NamedTuple):
    """A call that was made. results: none of one that has written to a list, what was written to of one that has written to a tensor, and
    `Fleeting` ones of one that has read no tensor. seen: `Seen` of the tensors among the arguments, in order; made: `Made` of the results:
    both flat, see `each`, and exact tuples of what refers to nothing, since what waits is held, and those Python's collector lets go
    of. code, lasti: the function of the trainer's that made it,
    and its instruction. grad: was autograd on? module: the part of the model that it was made in. destroyed: a copy of what a write to the
    weights of a model that nobody trains has destroyed, see `Trailing`."""

    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[Any]
    seen: tuple[Any, ...]
    made: tuple[Any, ...]
    code: CodeType | None
    lasti: int
    grad: bool
    module: str
    destroyed: Tensor | None

    @property
    def place(self) -> Place:
        """Where in the trainer's code."""
        return self.code, self.lasti


Raw = tuple[Any, ...]  # what makes a `RawCall`: making it takes as long as all else
OPERATOR, ARGS, KWARGS, RESULTS, SEEN, MADE, CODE, LASTI, GRAD, MODULE, DESTROYED = range(11)  # and where in it is what

WRITES, ADDRESS, SHAPE, WANTED = range(4)  # and where in what is seen of a tensor, or made
EACH = 4  # and how many these are


def identity(call: Raw) -> int:
    """Return what a call that has made something is known by as long as it waits: another tuple may stand for it by then."""
    return id(call[MADE])


def joins_batch(call: Raw) -> bool:
    """Has a call put many tensors together, without a gradient?"""
    return joins_many(call[OPERATOR].name, call[ARGS]) and not call[RESULTS][0].requires_grad


def each(flat: Iterable[Any]) -> Iterator[Seen]:
    """Take apart what was seen of tensors, or of what was made."""
    one = iter(flat)
    return zip(one, one, one, one, strict=True)


class Later:
    """What is done among calls that wait, when those before it have been understood. holds: tensors that it asks about."""

    __slots__ = ("act", "holds", "void")

    def __init__(self, act: Callable[[], object], void: Callable[[], object], holds: Sequence[Tensor] = ()) -> None:
        self.act, self.void, self.holds = act, void, holds


class SoFar:
    """How many calls there were at some moment: it is counted when somebody asks. number: None until then. settle: has it counted."""

    __slots__ = ("_settle", "number")

    def __init__(self, number: int | None, settle: Callable[[], None] = lambda: None) -> None:
        self.number, self._settle = number, settle

    @property
    def calls(self) -> int:
        """So many."""
        if self.number is None:
            self._settle()
        return self.number or 0


NONE = SoFar(0)

"""How a stretch of calls hangs together: what a step has in common with those before it that compute the same.

A training loop makes the same calls at the same lines in step after step, on other tensors. What tells two such stretches apart is which
operator is called where, with what whole numbers, and which tensor it is given: that of which earlier call, or the how-many-eth from
outside. A fraction may be another one in each step: a coefficient that is annealed, or that a controller sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from nanscope.capture.notes import Raw, Seen
from nanscope.torch_inside import writes_counted

RESULTS = 1 << 10  # of one call, at most
LIST = "["  # begins what is a list among arguments
SHAPE = 1  # where a key has the arguments of a call: numbers as they are, tensors as (code, does it want a gradient?)

Code = int  # of a tensor in a stretch: call × RESULTS + result; from −1 down, those that come from outside, in order


class Unlike(Exception):
    """A stretch that is not to be compared with others: something was written to amid it."""


class Passage:
    """One of them. key: equal for two that hang together alike. outer: tensors from outside. versions: how often each tensor had been
    written to when it was first read, or made."""

    def __init__(self, calls: Sequence[Raw]) -> None:
        self.calls = calls
        self.outer: list[Tensor] = []
        self.versions: dict[Code, int] = {}
        self._of_nothing: dict[Code, Tensor] = {}  # what calls have made that have read no tensor
        self._codes: dict[int, tuple[Code, int]] = {}  # tensor by identity → code, and how often it had been written to
        self.key = tuple([self._told(number, call) for number, call in enumerate(calls)])

    def _told(self, number: int, call: Raw) -> tuple[Any, ...]:
        operator, args, kwargs, results, seen, made, (code, lasti), grad, module = call
        if operator.mutable and not results:
            raise Unlike
        told = self._shape(args, iter(seen))
        codes, first, shared = self._codes, number * RESULTS, operator.view and not operator.mutable
        for item, (writes, *_) in zip(results, made, strict=True):
            version = self.versions[first] = seen[0][0] if shared and seen else writes  # a view counts with its base, when its call is over
            if seen:
                codes[id(item)] = first, version
            elif not item.handle.gone():
                codes[item.identity] = first, version
            first += 1
        named = tuple((name, float if type(value) is float else value) for name, value in kwargs.items()) if kwargs else ()
        return operator.overload, told, id(code), lasti, grad, module, len(results), named

    def _shape(self, args: Sequence[Any], seen: Iterator[Seen]) -> tuple[Any, ...]:
        told: list[Any] = []
        codes = self._codes
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                version, _, _, wanted = next(seen)
                known = codes.get(id(arg))
                if known is None:
                    self.outer.append(arg)
                    known = codes[id(arg)] = -len(self.outer), version
                    self.versions[known[0]] = version
                elif known[1] != version:
                    raise Unlike
                elif known[0] >= 0 and not self.calls[known[0] // RESULTS][4]:
                    self._of_nothing[known[0]] = arg
                told.append((known[0], wanted))
            elif kind is list or kind is tuple:
                told.append((LIST, self._shape(arg, seen)))
            else:
                told.append(float if kind is float else arg)
        return tuple(told)

    def code(self, tensor: Tensor) -> Code | None:
        """Return where a tensor stands, None if it does not."""
        known = self._codes.get(id(tensor))
        return None if known is None else known[0]

    def first(self, tensor: Tensor) -> Code | None:
        """Return where a tensor stood first: as what comes from outside, though a call may have handed it on."""
        outer = next((-1 - number for number, one in enumerate(self.outer) if one is tensor), None)
        return self.code(tensor) if outer is None else outer

    def tensor(self, code: Code) -> Tensor:
        """Return what stands there."""
        if code < 0:
            return self.outer[-1 - code]
        call = self.calls[code // RESULTS]
        result: Tensor = call[3][code % RESULTS] if call[4] else self._of_nothing[code]
        return result

    def was_written_to(self, code: Code, tensor: Tensor) -> bool:
        """Has somebody written to a tensor since it was first read, or made? tensor: what stands there."""
        return writes_counted(tensor) != self.versions[code]

    def numbers(self, number: int) -> Sequence[Any]:
        """Return the arguments of a call as they are, tensors among them."""
        given: Sequence[Any] = self.calls[number][1]
        return given

    def results(self, number: int) -> Sequence[Tensor]:
        """Return what a call has made of tensors; what it made of nothing nobody holds here."""
        call = self.calls[number]
        return call[3] if call[4] else ()

    def read(self, number: int) -> list[Code]:
        """Return the tensors that a call was given, as they were then; each as often as it was."""
        return list(_read(self.key[number][SHAPE]))

    def behind(self, code: Code, leaves: Container[Code] = ()) -> set[Code]:
        """Return all that a tensor was made of, itself included. leaves: it is not asked what these were made of."""
        found: set[Code] = set()
        waiting = [code]
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += self.read(one // RESULTS) if one >= 0 and one not in leaves else ()
        return found

    def times_read(self) -> Counter[Code]:
        """Return how often each tensor is among arguments."""
        return Counter(code for number in range(len(self.calls)) for code in self.read(number))


def _read(shape: Sequence[Any]) -> Iterator[Code]:
    for one in shape:
        if type(one) is tuple and one[0] == LIST:
            yield from _read(one[1])
        elif type(one) is tuple:
            yield one[0]

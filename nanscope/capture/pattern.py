"""How a stretch of calls hangs together: what a step has in common with those before it that compute the same.

A training loop makes the same calls at the same lines in step after step, on other tensors. What tells two such stretches apart is which
operator is called where, along which dimensions, and which tensor it is given: that of which earlier call, or the how-many-eth from
outside. Other numbers may be others in each step: a coefficient that is annealed, or that a controller sets, and the length of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from nanscope.capture import raw
from nanscope.capture.entries import tensors_of
from nanscope.capture.raw import EACH, Raw, joins_batch
from nanscope.program.ops import sizes_of
from nanscope.torch_inside import writes_counted

STRIDE = 1 << 10  # of one call, at most
LIST = "["  # begins what is a list among arguments; its length follows

NUMBERS = frozenset((int, float))
ALL, NONE = range(64), range(0)  # dimensions

Code = int  # of a tensor in a stretch: call × STRIDE + result; from −1 down, those that come from outside, in order


class Unlike(Exception):
    """A stretch that is not to be compared with others: something was written to amid it."""


class Passage:
    """One of them. root: what it leads to: what was computed beside that without a gradient has no part in it. whole: with what is left of
    the step before. key: equal for two that are alike. outer: tensors from outside."""

    def __init__(self, calls: Sequence[Raw], root: Tensor, whole: bool = False) -> None:
        self._all, self.whole = calls, whole
        self.calls = _leading_to(root, calls)
        self.outer: list[Tensor] = []
        self._versions: list[int] = []  # how often these had been written to when they were first read
        self._of_nothing: dict[Code, Tensor | None] = {}  # what calls have made that have read no tensor, where it is read
        self._codes: dict[int, tuple[Code, int]] = {}  # tensor by identity → code, and how often it had been written to
        self._places: dict[tuple[Any, ...], Code] = {}  # where those from outside lie that have no gradient
        self._read: list[list[int]] = []  # of each call what it was given: code × 2, + 1 if it wanted a gradient
        self.key = tuple([self._told(number, call) for number, call in enumerate(self.calls)])

    def _told(self, number: int, call: Raw) -> tuple[Any, ...]:
        operator, args, kwargs, results, seen, made, code, lasti, grad, module, _ = call
        if operator.mutable and not results:
            raise Unlike
        read: list[int] = []
        others: list[Any] = []
        self._tell(args, seen, read, others, sizes_of(operator.name))
        self._read.append(read)
        codes, first = self._codes, number * STRIDE
        if seen:
            shared = operator.view and not operator.mutable  # a view counts with its base, when its call is over
            for at, item in enumerate(results):
                codes[id(item)] = first + at, seen[raw.WRITES] if shared else made[at * EACH + raw.WRITES]
        else:
            for item, writes in zip(results, made[::EACH], strict=True):
                self._of_nothing[first] = None
                if not item.handle.gone():
                    codes[item.identity] = first, writes
                first += 1
        named = tuple((name, float if type(value) in NUMBERS else value) for name, value in kwargs.items()) if kwargs else ()
        return operator.overload, tuple(read), tuple(others), id(code), lasti, grad, module, len(results), named

    def _tell(self, args: Sequence[Any], seen: Sequence[Any], read: list[int], others: list[Any], sizes: Container[int]) -> None:
        """Take arguments apart: tensors, and whatever else. sizes: which of them are whole numbers that may be others."""
        codes, of_nothing = self._codes, self._of_nothing
        for place, arg in enumerate(args):
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                at = len(read) * EACH
                version, wanted = seen[at + raw.WRITES], seen[at + raw.WANTED]
                known = codes.get(id(arg))
                if known is None:
                    known = codes[id(arg)] = self._from_outside(arg, version, wanted), version
                elif known[1] != version:
                    raise Unlike
                elif of_nothing and known[0] in of_nothing:
                    of_nothing[known[0]] = arg
                read.append(known[0] * 2 + wanted)
            elif kind is list or kind is tuple:
                others += LIST, len(arg)
                self._tell(arg, seen, read, others, ALL if place in sizes else NONE)
            else:
                others.append(float if kind is float or (kind is int and place in sizes) else arg)

    def _from_outside(self, tensor: Tensor, version: int, wanted: bool) -> Code:
        """Return where a tensor stands that no call here has made: it may be another name of one that does."""
        lies = None if wanted else _lies(tensor)
        known = self._places.get(lies) if lies is not None else None
        if known is not None and version == (self._versions[-1 - known] if known < 0 else self._codes[id(self.tensor(known))][1]):
            return known
        self.outer.append(tensor)
        self._versions.append(version)
        if lies is not None:
            self._places[lies] = -len(self.outer)
        return -len(self.outer)

    def code(self, tensor: Tensor) -> Code | None:
        """Return where a tensor stands, None if it does not."""
        known = self._codes.get(id(tensor))
        return None if known is None else known[0]

    def first(self, tensor: Tensor) -> Code | None:
        """Return where a tensor stood first: as what comes from outside, though a call may have handed it on; or another one of the same
        memory, as numpy's is each time that it is an index."""
        outer = next((-1 - number for number, one in enumerate(self.outer) if one is tensor), None)
        known = self.code(tensor) if outer is None else outer
        return self._places.get(_lies(tensor)) if known is None and not tensor.requires_grad else known

    def tensor(self, code: Code) -> Tensor:
        """Return what stands there."""
        if code < 0:
            return self.outer[-1 - code]
        call = self.calls[code // STRIDE]
        result: Tensor | None = call[raw.RESULTS][code % STRIDE] if call[raw.SEEN] else self._of_nothing[code]
        if result is None:
            raise LookupError("nobody has read it")
        return result

    def was_written_to(self, code: Code, tensor: Tensor) -> bool:
        """Has somebody written to a tensor since it was first read, or made? tensor: what stands there."""
        return writes_counted(tensor) != (self._versions[-1 - code] if code < 0 else self._codes[id(tensor)][1])

    def numbers(self, number: int) -> Sequence[Any]:
        """Return the arguments of a call as they are, tensors among them."""
        given: Sequence[Any] = self.calls[number][raw.ARGS]
        return given

    def results(self, number: int) -> Sequence[Tensor]:
        """Return what a call has made of tensors; what it made of nothing nobody holds here."""
        call = self.calls[number]
        return call[raw.RESULTS] if call[raw.SEEN] else ()

    def read(self, number: int) -> list[Code]:
        """Return the tensors that a call was given, as they were then; each as often as it was."""
        return [code >> 1 for code in self._read[number]]

    def behind(self, code: Code, leaves: Container[Code] = ()) -> set[Code]:
        """Return all that a tensor was made of, itself included. leaves: it is not asked what these were made of."""
        found: set[Code] = set()
        waiting = [code]
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += self.read(one // STRIDE) if one >= 0 and one not in leaves else ()
        return found

    def once(self, numbers: Sequence[int]) -> list[int]:
        """Return those of some calls that stand in a program: of equal views of one tensor that are there at once the last one is read, as
        in `v[k] + rho * (r - v[k])`, and the first one is not missed."""
        made: dict[int, tuple[Any, ...]] = {}  # by which calls: views, and of what
        last: dict[tuple[Any, ...], int] = {}
        read = set[int]()
        for number in numbers:
            read.update(last[made[one]] if one in made else one for one in (code // STRIDE for code in self.read(number)))
            operator = self.calls[number][raw.OPERATOR]
            if operator.view and not operator.mutable:
                made[number] = told = (*self.read(number), *self.calls[number][raw.MADE][raw.ADDRESS : EACH])  # of what, and where it lies
                last[told] = number
        return [number for number in numbers if number not in made or number in read or number == numbers[-1]]

    def references(self) -> Counter[int]:
        """Return how often each tensor is referred to by the calls, and those beside them, by identity."""
        return Counter(
            id(item) for call in self._all for item in (*tensors_of(call[raw.ARGS]), *(call[raw.RESULTS] if call[raw.SEEN] else ()))
        )

    def times_read(self) -> Counter[Code]:
        """Return how often each tensor is among arguments."""
        return Counter(code for number in range(len(self.calls)) for code in self.read(number))


def _leading_to(root: Tensor, calls: Sequence[Raw]) -> Sequence[Raw]:
    """Return the calls that a tensor may have been made by, and those that have made something with a gradient, or written to lists. A
    batch that was put together of many tensors comes from outside."""
    read, found = {id(root)}, list[Raw]()
    for call in reversed(calls):
        results = call[raw.RESULTS]
        if call[raw.SEEN]:
            leads = not results or any(id(item) in read or item.requires_grad for item in results)
        else:
            leads = any(item.identity in read for item in results)
        if leads and not joins_batch(call):
            found.append(call)
            read.update(map(id, tensors_of(call[raw.ARGS])))
    found.reverse()
    return found


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    """Where it does, and how: numpy's memory is made a tensor anew each time that it is an index."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

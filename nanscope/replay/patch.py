"""How a program is edited: calls put in before or after the origin, chunks and copies of it included."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.locate.origin import Element
from nanscope.locate.trace import Trace
from nanscope.program.calls import Arg, Call, Leaf, Ref, refs, words_of
from nanscope.program.numbers import is_finite
from nanscope.program.ops import JOINS, carries
from nanscope.program.program import Program


@dataclass(frozen=True, slots=True)
class Variant:
    """An edited program with the tensors it needs. id: class of the edit. label: what it does, in words, for this program. fills: a value
    of which it makes the bad elements 0."""

    id: str
    label: str
    program: Program
    tensors: dict[int, Tensor]
    control: bool = False
    fills: int | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    """Where an edit may act: a program that was run, and the origin in it."""

    trace: Trace
    origin: Element

    @property
    def program(self) -> Program:
        """The program to edit."""
        return self.trace.program

    @property
    def values(self) -> Mapping[int, Tensor]:
        """All values of its run."""
        return self.trace.values

    @property
    def tensors(self) -> dict[int, Tensor]:
        """Its leaves, as a dictionary that an edit may add to."""
        return self.trace.tensors

    def edited(self, program: Program) -> Patch:
        """Return the patch of a program that was edited already, for one more edit at the same origin."""
        origin = replace(self.origin, call=program.producers.get(self.origin.value_id))
        return Patch(Trace(program, self.trace.run), origin)

    @property
    def call(self) -> Call:
        """The call that made the origin."""
        assert self.origin.call is not None
        return self.program.calls[self.origin.call]

    @property
    def op(self) -> str:
        """The bare name of that call's operator, "" where the origin came in."""
        return self.call.name if self.origin.call is not None else ""

    @property
    def acting(self) -> str:
        """That name in words: the first use of what came in."""
        return self.op or "its first use"

    @property
    def result(self) -> str:
        """What the code calls the origin."""
        site = self.origin.site
        return self.origin.variable or (site.expression if site and site.expression else "the result")

    def called(self, value: int | None) -> str:
        """Return what the code calls a value that the origin was made from, or the origin."""
        for operand in self.origin.operands:
            if operand.id == value and operand.name:
                return operand.name
        if value == self.origin.value_id:
            return self.result
        position = next((p for p in range(2) if self.operand(p) == value), None)
        words = words_of(self.call, self.origin.site) if self.origin.site and self.origin.call is not None else ()
        return words[position] if position is not None and position < len(words) else "the operand"

    def siblings(self, index: int | None = None) -> list[int]:
        """Return the indices of all calls that one source expression made (the origin's by default): one a chunk, one a turn of a loop."""
        own = self.origin.call if index is None else index
        assert own is not None
        call = self.program.calls[own]
        return [i for i, c in enumerate(self.program.calls) if i == own or (c.op == call.op and c.site == call.site >= 0)]

    def entries(self) -> list[int]:
        """Return an origin that came in and what else came in bad and was put together with it by one call: the samples of a batch."""
        own, readers = self.origin.value_id, self.program.readers
        call = next(iter(readers(own)), None)
        while call is not None and call.name not in JOINS and carries(call.op):
            call = next((reader for out in call.outs if out is not None for reader in readers(out)), None)
        if call is None or call.name not in JOINS:
            return [own]
        data = {leaf.id for leaf in self.program.leaves if not leaf.is_of_model} - {own}
        came = dict.fromkeys(self._came_as(value) for value in call.inputs())
        return [own, *(value for value in came if value in data and not bool(is_finite(self.values[value])))]

    def _came_as(self, value: int) -> int:
        """Return what was moved to be this value, and nothing else."""
        while (made := self.program.maker(value)) is not None and made.name not in JOINS and carries(made.op):
            value = next(made.inputs())
        return value

    def with_number(self, position: int, number: float) -> Program:
        """Return the program with a number as an argument of the origin's call, and of its siblings."""
        calls = list(self.program.calls)
        for index in self.siblings():
            args = tuple(number if place == position else arg for place, arg in enumerate(calls[index].args))
            calls[index] = replace(calls[index], args=args)
        return replace(self.program, calls=tuple(calls))

    def operand(self, position: int) -> int | None:
        """Return the value that the origin's call reads as argument `position`, None if it is a number."""
        if self.origin.call is None or position >= len(self.call.args):
            return None
        arg = self.call.args[position]
        if isinstance(arg, Ref):
            return arg.id
        return next(iter(refs(arg)), None)


Insert = tuple[str, tuple[Arg, ...]]  # operator and arguments; Ref(-1) is the value being edited, Ref(-2) the insert before this one


def before(patch: Patch, position: int, inserts: Sequence[Insert] | Callable[[int], Sequence[Insert]]) -> Program:
    """Return the program with `inserts` between the origin's call (and its siblings) and what they read as argument `position`.

    inserts: the same for all siblings, or a function of a sibling's ordinal.
    """
    if patch.operand(position) is None:
        raise NanscopeError(f"argument {position} of {patch.call.op} is not a tensor", slug="edit-not-applicable")
    calls = list(patch.program.calls)
    fresh = patch.program.new_id()
    for ordinal, index in reversed(list(enumerate(patch.siblings()))):
        value = next(refs(calls[index].args[position]), None) if position < len(calls[index].args) else None
        if value is None:
            continue
        added, last = emitted(fresh, value, inserts(ordinal) if callable(inserts) else inserts, calls[index])
        fresh += len(added)
        args = tuple(_with(arg, value, last) if place == position else arg for place, arg in enumerate(calls[index].args))
        calls[index : index + 1] = [*added, replace(calls[index], args=args)]
    return in_order(replace(patch.program, calls=tuple(calls)))


def after(patch: Patch, inserts: Sequence[Insert], but: Container[int] = ()) -> Program:
    """Return the program with `inserts` between the origin's value (and its siblings') and everything that reads it.

    but: values whose calls go on reading it as it is.
    """
    calls = list(patch.program.calls)
    output, fresh = patch.program.output, patch.program.new_id()
    places = (
        [(index, calls[index].outs[0]) for index in patch.siblings()]
        if patch.origin.call is not None
        else sorted((patch.program.producers.get(came, -1), came) for came in patch.entries())
    )
    for index, value in reversed(places):
        if value is None:
            continue
        like = calls[index] if index >= 0 else Call("", (), (), (), -1, True)
        added, last = emitted(fresh, value, inserts, like)
        fresh += len(added)
        rest = [call if call.outs[0] in but else reading(call, value, last) for call in calls[index + 1 :]]
        output = last if output == value else output
        calls = [*calls[: index + 1], *added, *rest]
    return replace(patch.program, calls=tuple(calls), output=output)


def held_still(
    patch: Patch, program: Program, tensors: dict[int, Tensor], bad: Callable[[int], Tensor]
) -> tuple[Program, dict[int, Tensor]]:
    """Return an edited program in which no gradient goes back through the elements of the origin that did the harm, and its tensors.

    bad: of a value that the origin's call has made, or a sibling's, which elements these are.
    """
    for value in [out for index in patch.siblings() if (out := patch.program.calls[index].outs[0]) is not None]:
        at, mark = program.producers.get(value), program.new_id()
        if at is None:
            continue
        still, last = mark + 1, mark + 2
        added = (
            Call("aten.detach.default", (Ref(value),), (), (still,)),
            Call("aten.where.self", (Ref(mark), Ref(still), Ref(value)), (), (last,), program.calls[at].site, program.calls[at].grad),
        )
        rest = (reading(call, value, last) for call in program.calls[at + 1 :])
        program = replace(
            program,
            leaves=(*program.leaves, Leaf(mark, "offending", "data", False)),
            calls=(*program.calls[: at + 1], *added, *rest),
            output=last if program.output == value else program.output,
        )
        tensors = {**tensors, mark: bad(value)}
    return program, tensors


def emitted(fresh: int, value: int, inserts: Sequence[Insert], like: Call) -> tuple[list[Call], int]:
    """Return the calls of `inserts` on a value, at the place of another call, and what they make in the end. fresh: the first free id."""
    added: list[Call] = []
    last = value
    for op, args in inserts:
        mapped = tuple(_mapped(arg, value, last) for arg in args)
        added.append(Call(op, mapped, (), (fresh,), like.site, like.grad, like.module))
        last, fresh = fresh, fresh + 1
    return added, last


def _mapped(arg: Arg, value: int, last: int) -> Arg:
    if isinstance(arg, Ref):
        return {-1: Ref(value), -2: Ref(last)}.get(arg.id, arg)
    return arg


def _with(arg: Arg, value: int, last: int) -> Arg:
    if isinstance(arg, Ref):
        return Ref(last) if arg.id == value else arg
    if isinstance(arg, tuple):
        return tuple(_with(item, value, last) for item in arg)
    return arg


def reading(call: Call, value: int, last: int) -> Call:
    """Return a call that reads another value in the place of one."""
    if value not in call.inputs():
        return call
    return replace(
        call,
        args=tuple(_with(arg, value, last) for arg in call.args),
        kwargs=tuple((name, _with(arg, value, last)) for name, arg in call.kwargs),
    )


def in_order(program: Program) -> Program:
    """Put calls after what they read: an inserted mask may be made later in the recording than the op it now guards."""
    made = {leaf.id for leaf in program.leaves}
    lacking = [set(call.inputs()) - made for call in program.calls]
    readers: dict[int, list[int]] = {}
    for index, values in enumerate(lacking):
        for value in values:
            readers.setdefault(value, []).append(index)
    ready = [index for index, values in enumerate(lacking) if not values]  # a heap: of these the first one is next
    ordered: list[Call] = []
    while ready:
        ordered.append(program.calls[heappop(ready)])
        for out in (out for out in ordered[-1].outs if out is not None):
            for reader in readers.pop(out, ()):
                lacking[reader].remove(out)
                if not lacking[reader]:
                    heappush(ready, reader)
    if len(ordered) < len(program.calls):
        raise NanscopeError("the mask depends on the value that it should guard", slug="edit-not-applicable")
    return replace(program, calls=tuple(ordered))


def index_in(origin: Element, content: Tensor) -> tuple[int, ...]:
    """Return the index that the origin has in a tensor that broadcasts to it."""
    index = origin.index[-content.dim() :] if len(origin.index) >= content.dim() else origin.index
    return tuple(min(i, n - 1) for i, n in zip(index, content.shape, strict=False))

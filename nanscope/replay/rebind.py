"""An edit of all that reads an operand by the same words: of a name, which is bound anew before the statement, or of an expression.

    ref_log_ratio = ref_log_ratio.masked_fill(completion_mask == 0, 0.0)
    per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1

    per_token_kl = torch.exp((ref - logps).masked_fill(mask == 0, 0.0)) - (ref - logps).masked_fill(mask == 0, 0.0) - 1

A mask in the operand of `exp` alone would leave the rest of the formula with what the mask excludes: finite, and of no meaning in a log;
and with the next one that is not finite, it is NaN again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nanscope.errors import NanscopeError
from nanscope.program.calls import Call, Ref, Site, refs
from nanscope.program.program import Program
from nanscope.replay.namespace import Namespace, alike
from nanscope.replay.patch import Insert, Patch, emitted, in_order, reading
from nanscope.replay.statement import Statement

NOWHERE = -1  # the site of a call that stands in no line of the source


def bound_anew(patch: Patch, position: int, inserts: Callable[[int], Sequence[Insert]]) -> Program:
    """Return the program with `inserts` between what the origin's call (and its siblings) read as argument `position` and all that reads it
    by that name, from this statement on.

    inserts: a function of a sibling's ordinal. Raises NanscopeError where the operand is no name of the function, or it is not certain who
    would read the other value.
    """
    siblings = patch.siblings()
    name = _Name.of(patch, position, siblings[0])
    program, fresh = patch.program, patch.program.new_id()
    values = [patch.program.calls[index].args[position] for index in siblings]
    if len(set(values)) < len(values) or not all(isinstance(value, Ref) for value in values):
        raise name.uncertain  # a loop that reads the same value again
    for ordinal, value in enumerate(next(refs(value)) for value in values):
        later = [call for call in patch.program.readers(value) if name.is_read(call, value)]
        added, last = emitted(fresh, value, inserts(ordinal), Call("", (), (), (), NOWHERE, later[0].grad))
        fresh += len(added)
        reads = {call.outs: reading(call, value, last) for call in later}
        calls = [reads.get(call.outs, call) for call in program.calls]
        first = next(place for place, call in enumerate(calls) if call.outs in reads)
        program = replace(program, calls=(*calls[:first], *added, *calls[first:]))
    return in_order(program)


def wherever_written(patch: Patch, position: int, inserts: Callable[[int], Sequence[Insert]]) -> Program:
    """Return the program with `inserts` between what the origin's call reads as argument `position` and all in its statement that reads the
    same expression.

    Raises NanscopeError where the statement has it once, or the operand is no expression of it.
    """
    program, value, own = patch.program, patch.operand(position), patch.siblings()
    made, site = None if value is None else program.maker(value), program.site_of(patch.call)
    statement = None if site is None else Statement.of(site)
    if made is None or site is None or statement is None or statement.writes or len(own) > 1:
        raise _uncertain("the operand")
    same = {
        call.outs[0]
        for call in program.calls
        if (call.op, call.args, call.kwargs, call.grad) == (made.op, made.args, made.kwargs, made.grad)
    }
    readers = [
        index for index, call in enumerate(program.calls) if not same.isdisjoint(call.inputs()) and _is_in(program, call, site, statement)
    ]
    if own[0] not in readers or len(readers) < 2:
        raise NanscopeError(f"{patch.called(value)} stands once in its statement", slug="edit-not-applicable")
    calls, fresh = list(program.calls), program.new_id()
    for index in reversed(readers):
        call = calls[index]
        for read in dict.fromkeys(one for one in call.inputs() if one in same):
            added, last = emitted(fresh, read, inserts(0), call)
            fresh += len(added)
            calls[index : index + 1] = [*added, call := reading(call, read, last)]
            index += len(added)
    return in_order(replace(program, calls=tuple(calls)))


def _is_in(program: Program, call: Call, site: Site, statement: Statement) -> bool:
    """Was a call made in a statement?"""
    there = program.site_of(call)
    if there is None or not alike(there, site):
        return False
    return statement.first <= there.line and (there.end_line or there.line) < statement.first + len(statement.lines)


def renamed(before: Program, after: Program) -> dict[int, int]:
    """Return which value an edited program reads under the name of another one: of a name that was bound anew, and of what came in."""
    calls = {call.outs: call for call in before.calls}
    found = {}
    for call in after.calls:
        was = calls.get(call.outs)
        for old, new in zip(() if was is None else was.inputs(), call.inputs(), strict=False):
            maker = after.maker(new)
            if old != new and maker is not None and maker.outs not in calls and maker.site == NOWHERE:
                found[old] = new
    return found


@dataclass(frozen=True, slots=True)
class _Name:
    """What the function calls the operand of a call. statement: the call's; first: index of the first call that it made."""

    text: str
    site: Site
    statement: Statement
    namespace: Namespace
    first: int

    @staticmethod
    def of(patch: Patch, position: int, first: int) -> _Name:
        """Return the name. Raises NanscopeError where it is none, or not one that the function may bind before this statement."""
        site, namespace = patch.program.site_of(patch.call), Namespace(patch.program, patch.trace.names)
        text = namespace.words(patch.call, position, site) if site is not None else ""
        statement = None if site is None else Statement.of(site)
        if site is None or statement is None or not text.isidentifier() or text.isupper():
            raise _uncertain(text or "the operand")
        if statement.writes or not statement.begins or statement.binds(text) or not namespace.is_own(text, site):
            raise _uncertain(text)
        return _Name(text, site, statement, namespace, first)

    @property
    def uncertain(self) -> NanscopeError:
        """Says that it is not certain who reads it."""
        return _uncertain(self.text)

    def is_read(self, call: Call, value: int) -> bool:
        """Does a call read a value by this name in the statement, or after it?"""
        program = self.namespace.program
        site = program.site_of(call)
        here = site is not None and alike(self.site, site)
        if site is None or not here or site.line < self.statement.first:
            if any(out is not None and program.producers[out] < self.first for out in call.outs):
                return False
            raise self.uncertain  # another function, handed the value nobody knows when; or a loop that goes on reads it above
        if any(Ref(value) == arg and self.namespace.words(call, place, site) != self.text for place, arg in enumerate(call.args)):
            raise self.uncertain  # by another name
        return True


def _uncertain(name: str) -> NanscopeError:
    return NanscopeError(f"who reads {name} by this name is not certain", slug="edit-not-applicable")

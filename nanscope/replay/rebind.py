"""An edit under a name of the source: the name is bound anew before the statement, and what reads it after that reads the other value.

    ref_log_ratio = ref_log_ratio.masked_fill(completion_mask == 0, 0.0)
    per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1

A mask in the operand of `exp` alone would leave the rest of the formula with what the mask excludes: finite, and of no meaning in a log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nanscope.errors import NanscopeError
from nanscope.program.calls import Call, Ref, refs
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
    name, statement = _name(patch, position)
    program, fresh = patch.program, patch.program.new_id()
    values = [patch.program.calls[index].args[position] for index in patch.siblings()]
    if len(set(values)) < len(values) or not all(isinstance(value, Ref) for value in values):
        raise _uncertain(name)  # a loop that reads the same value again
    for ordinal, value in enumerate(next(refs(value)) for value in values):
        later = [call for call in patch.program.readers(value) if _is_later(patch, call, value, name, statement)]
        added, last = emitted(fresh, value, inserts(ordinal), Call("", (), (), (), NOWHERE, later[0].grad))
        fresh += len(added)
        reads = {call.outs: reading(call, value, last) for call in later}
        calls = [reads.get(call.outs, call) for call in program.calls]
        first = next(place for place, call in enumerate(calls) if call.outs in reads)
        program = replace(program, calls=(*calls[:first], *added, *calls[first:]))
    return in_order(program)


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


def _name(patch: Patch, position: int) -> tuple[str, Statement]:
    """What the function calls the operand, and the statement of the origin."""
    site = patch.program.site_of(patch.call)
    namespace = Namespace(patch.program, patch.trace.names)
    name = namespace.words(patch.call, position, site) if site is not None else ""
    statement = None if site is None else Statement.of(site)
    if site is None or statement is None or not name.isidentifier() or name.isupper():
        raise _uncertain(name or "the operand")
    if statement.writes or not statement.begins or statement.binds(name) or not namespace.is_own(name, site):
        raise _uncertain(name)
    return name, statement


def _is_later(patch: Patch, call: Call, value: int, name: str, statement: Statement) -> bool:
    """Does a call read a value by its name in the statement, or after it?"""
    own, site = patch.program.site_of(patch.call), patch.program.site_of(call)
    assert own is not None
    if site is None or not alike(own, site):
        if _is_before(patch, call):
            return False
        raise _uncertain(name)  # another function, of which nobody knows whether it was handed the value before or after
    if site.line < statement.first:
        if not _is_before(patch, call):
            raise _uncertain(name)  # a loop that goes on reads it above
        return False
    namespace = Namespace(patch.program, patch.trace.names)
    if any(Ref(value) == arg and namespace.words(call, place, site) != name for place, arg in enumerate(call.args)):
        raise _uncertain(name)  # by another name
    return True


def _is_before(patch: Patch, call: Call) -> bool:
    return any(out is not None and patch.program.producers[out] < min(patch.siblings()) for out in call.outs)


def _uncertain(name: str) -> NanscopeError:
    return NanscopeError(f"who reads {name} by this name is not certain", slug="edit-not-applicable")

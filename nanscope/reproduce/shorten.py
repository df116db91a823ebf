"""Fewer calls: values become what comes in, calls are left out, terms of a sum are dropped, and the loss ends earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from nanscope.locate.names import Names
from nanscope.program.calls import Arg, Call, Computes, Leaf, Ref, substitute
from nanscope.program.ops import ADDITIONS, CARRYING, COPIES, MOVES, OVERWRITING, RESCALINGS, SIZED, UNDONE_SECOND, Flow, flow_of
from nanscope.program.program import Program
from nanscope.reproduce.alike import Case, Failed

ENOUGH = 12  # calls that compute, and leaves: so many are read at a glance, and what is left is still somebody's loss
FRESH = 1 << 32  # no program has so many values: what was in it and is gone keeps its number for itself
ENDLESS = 400  # calls: a loop over tokens, whose loss is not waited for
NEAREST = 6  # ways to let it end early
LONG, PART = 64, 8  # of a program of so many calls, what takes one in eight of them away goes first
MANY = 3  # calls that a leaf stands for: it is worth it even in a short program

Edit: TypeAlias = tuple[str, Callable[[], Case | None]]  # what it is called, and what makes it


def essential(case: Case, failed: Failed, names: Names) -> Iterator[Edit]:
    """Yield what any reader would leave out: terms that have no part in it, copies, and long ways to what is not the matter."""
    program, behind = case.program, _behind(case, failed)
    if len(program.calls) > ENDLESS:
        yield from islice(_ends(case, failed, behind), NEAREST)
    if len(program.calls) > LONG:
        hoists = sorted(_hoists(case, failed, names, behind), key=lambda found: -found[0])
        yield from (edit for saved, edit in hoists if saved * PART > len(program.calls))
    for index, call in enumerate(program.calls):
        if call.name in OVERWRITING:  # a part of the tensor that is not the matter
            yield _without(case, index, next(call.inputs()))
    for index, call in reversed(list(enumerate(program.calls))):
        if call.name in ADDITIONS:
            yield from (_without(case, index, value) for value in call.inputs() if value in behind or value == failed.origin.value_id)
    for saved, (key, make) in _hoists(case, failed, names, behind):
        if saved >= MANY:
            yield key, lambda make=make: _worth(case, make())  # type: ignore[misc]
    yield from (edit for _, edit in _hoists(case, failed, names, behind, only=Flow.CREATE))
    for index, call in enumerate(program.calls):
        yield from _of_nothing(case, index, call)
    for index, call in enumerate(program.calls):
        if call.name in CARRYING or (call.name in COPIES - {"detach"} and _is_same(failed, call)):
            yield _without(case, index, next(call.inputs()))


def written(case: Case, failed: Failed, names: Names) -> Iterator[Edit]:
    """Yield what lets a tensor come in as a write has left it. The form in which a write is recorded counts elements of the whole tensor,
    which no part of a batch has."""
    hoists = dict(edit for _, edit in _hoists(case, failed, names, _behind(case, failed)))
    for call in reversed(case.program.calls):
        read = next(call.inputs(), None)
        maker = None if read is None or call.name not in SIZED else case.program.maker(read)
        if maker is not None and maker.name == "scatter" and (key := f"hoist {call.outs[0]}") in hoists:
            yield key, hoists[key]


def shortcuts(case: Case, failed: Failed, names: Names) -> Iterator[Edit]:
    """Yield what makes a long program a short one, as long as it is long."""
    program, behind = case.program, _behind(case, failed)
    if computing(program) + len(program.leaves) <= ENOUGH:
        return
    for _, edit in sorted(_hoists(case, failed, names, behind), key=lambda found: -found[0]):
        yield edit
    yield from _jumps(case, failed, behind)
    for index, call in reversed(list(enumerate(program.calls))):
        if call.outs[0] != failed.origin.value_id:
            read = dict.fromkeys(call.inputs())
            yield from (_without(case, index, value) for value in sorted(read, key=lambda value: value not in behind))
    if program.computes is Computes.LOSS:
        yield from reversed(list(_ends(case, failed, behind)))


def _ends(case: Case, failed: Failed, behind: set[int]) -> Iterator[Edit]:
    """Yield the ways to let the loss end in the sum of what is made of the origin, the shortest first."""
    for call in case.program.calls if case.program.computes is Computes.LOSS else ():
        for out in call.outs:
            if out is not None and out != case.program.output and (out in behind or out == failed.origin.value_id):
                yield f"end {out}", lambda out=out: _ending(case, out)  # type: ignore[misc]


def computing(program: Program) -> int:
    """Return how many calls do more than carry elements from one place to another."""
    return sum(call.name not in MOVES for call in program.calls)


def _behind(case: Case, failed: Failed) -> set[int]:
    """What is made of the origin."""
    found = {failed.origin.value_id}
    for call in case.program.calls:
        if any(value in found for value in call.inputs()):
            found.update(out for out in call.outs if out is not None)
    return found - {failed.origin.value_id}


def _is_same(failed: Failed, call: Call) -> bool:
    """Does a call give what it reads, in the same dtype?"""
    out, value = call.outs[0], next(call.inputs(), -1)
    values = failed.trace.values
    return out is not None and value in values and values[out].dtype == values[value].dtype


_NOTHING = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}  # second operands that change nothing


def _of_nothing(case: Case, index: int, call: Call) -> Iterator[Edit]:
    """Leave a call out that adds 0, scales, or multiplies by the same once more."""
    number = _NOTHING.get(call.name)
    for place, arg in enumerate(call.args[:2] if number is not None else ()):
        other = call.args[1 - place] if len(call.args) > 1 else None
        if not isinstance(other, Ref) or (place == 0 and call.name in UNDONE_SECOND):
            continue
        given = case.tensors.get(arg.id) if isinstance(arg, Ref) else arg
        if given is None or isinstance(given, (str, tuple, torch.dtype)):
            continue
        scale = call.name in RESCALINGS and torch.as_tensor(given).dim() == 0
        if scale or bool(torch.as_tensor(given == number).all()) or _is_again(case, call, arg):
            yield _without(case, index, other.id)


def _is_again(case: Case, call: Call, arg: Arg) -> bool:
    """Is it multiplied by what it was multiplied by before?"""
    if not isinstance(arg, Ref) or call.name != "mul":
        return False
    return any(other is not call and other.name == "mul" and arg in other.args for other in case.program.calls)


def _jumps(case: Case, failed: Failed, behind: set[int]) -> Iterator[Edit]:
    """Yield the ways to read the origin, or what is made of it, where something of the same shape is read that is made of it later."""
    values, program = failed.trace.values, case.program
    order = [failed.origin.value_id, *(out for call in program.calls for out in call.outs if out in behind)]
    for late in range(len(order) - 1, 0, -1):
        for early in range(min(late, JUMPED)):
            one, other = order[late], order[early]
            index = program.producers.get(one)
            if index is not None and one in values and other in values and values[one].shape == values[other].shape:
                yield f"jump {one} {other}", lambda index=index, other=other: _left_out(case, index, other)  # type: ignore[misc]


JUMPED = 4  # values next to the origin, to which others are led back


def _hoists(case: Case, failed: Failed, names: Names, behind: set[int], only: Flow | None = None) -> Iterator[tuple[int, Edit]]:
    """Yield, for each call that the origin is no part of, how many calls may go when what it makes comes in, and how to do it."""
    program, made_of = case.program, _made_of(case.program)
    for index in range(len(program.calls) - 1, -1, -1):
        call = program.calls[index]
        outs = [out for out in call.outs if out is not None]
        if (failed.origin.value_id in outs and failed.origin.born) or any(out in behind for out in outs):
            continue
        used = [out for out in outs if program.consumers.get(out)]
        if (only is not None and flow_of(call.op) is not only) or not used:
            continue
        if all(isinstance(failed.trace.values.get(out), Tensor) for out in used):
            edit = f"hoist {used[0]}", lambda index=index, used=used: _hoisted(case, failed, names, index, used)
            yield made_of[used[0]].bit_count(), edit


def _made_of(program: Program) -> dict[int, int]:
    """The calls behind each value, as bits: what goes with it if nobody else needs them."""
    found: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        bits = 1 << index
        for value in call.inputs():
            bits |= found.get(value, 0)
        found.update((out, bits) for out in call.outs if out is not None)
    return found


def _worth(case: Case, made: Case) -> Case | None:
    return made if len(case.program.calls) - len(made.program.calls) >= MANY else None


def _hoisted(case: Case, failed: Failed, names: Names, index: int, outs: list[int]) -> Case:
    values, program = failed.trace.values, case.program
    leaves = []
    for out in outs:
        role = names.role(out)
        carries = out in failed.trace.run.grads and values[out].is_floating_point()
        leaves.append(Leaf(out, names.name(out), "module" if carries else "data", carries, "", str(role) if role is not None else ""))
    calls = (*program.calls[:index], *program.calls[index + 1 :])
    smaller = replace(program, leaves=(*program.leaves, *leaves), calls=calls)
    tensors = {**case.tensors, **{out: values[out].detach().contiguous() for out in outs}}
    return Case(smaller, tensors, case.drawn).sliced


def _without(case: Case, index: int, value: int) -> Edit:
    """Leave a call out: who reads what it makes reads one of its operands."""
    return f"without {case.program.calls[index].outs[0]} {value}", lambda: _left_out(case, index, value)


def _left_out(case: Case, index: int, value: int) -> Case | None:
    program = case.program
    out = program.calls[index].outs[0]
    if out is None:
        return None
    other = {out: value}
    calls = (*program.calls[:index], *(_reading(call, other) for call in program.calls[index + 1 :]))
    return Case(replace(program, calls=calls, output=other.get(program.output, program.output)), case.tensors, case.drawn).sliced


def _reading(call: Call, other: dict[int, int]) -> Call:
    if not any(value in other for value in call.inputs()):
        return call
    args: tuple[Arg, ...] = tuple(substitute(arg, other) for arg in call.args)
    return replace(call, args=args, kwargs=tuple((name, substitute(arg, other)) for name, arg in call.kwargs))


def _ending(case: Case, value: int) -> Case | None:
    """The sum of a value as the loss."""
    program = case.program
    total = max(program.new_id(), FRESH)
    end = Call("aten.sum.default", (Ref(value),), (), (total,))
    shorter = Case(replace(program, calls=(*program.calls, end), output=total), case.tensors, case.drawn).sliced
    return shorter if len(shorter.program.calls) < len(program.calls) else None

"""What the trainer's own lines make of the outputs of one module before another one is given it.

hidden = encoder(ids)
hidden = torch.log(hidden * 0)      recorded, and behind a module, where no loss reads it
values = head(hidden)
loss = values.pow(2).mean()

So what led to the arguments of a model is taken from the tape with the loss: a second look goes on through it to the modules before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from nanscope.capture.entries import Opaque, Value
from nanscope.capture.modules import KEPT_BYTES, Address, ModuleCall, place_of, tensors_in, version_of
from nanscope.capture.tape import Tape
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.local import local
from nanscope.program.numbers import is_finite, tensor_bytes
from nanscope.program.program import Program, join

DEEP = 4  # calls, one behind the other, that are gone back over


@dataclass(frozen=True, slots=True)
class Glue:
    """What made an argument of a module. place: where that lies. tensors, places: the leaves of the program, and where they lay. diff: a
    gradient flows through it; what is detached lies in the same place.
    """

    place: Address
    program: Program
    tensors: Mapping[int, Tensor]
    places: Mapping[int, Address]
    diff: bool = True

    def is_whole(self) -> bool:
        """Is all that the program reads still there?"""
        return all(local(tensor) is not None for tensor in self.tensors.values())

    def leading_to(self, argument: int) -> Program:
        """Return the program with its result under another id."""
        return leading(self.program, argument)


def leading(program: Program, value: int) -> Program:
    """Return a program with its result under another id: as a copy, which may lie otherwise than what was copied."""
    if value == program.output:
        return program
    copy = Call("aten.clone.default", (Ref(program.output),), (), (value,))
    return replace(program, calls=(*program.calls, copy), output=value)


def with_gradients(program: Program, value: int) -> Program:
    """Return a program whose calls after that which made a value are made with gradients."""
    late = (any(out is not None and out > value for out in call.outs) for call in program.calls)
    return replace(program, calls=tuple(replace(call, grad=call.grad or after) for call, after in zip(program.calls, late, strict=True)))


def glue_before(tape: Tape, calls: Iterable[ModuleCall]) -> tuple[Glue, ...]:
    """Return what made the arguments of calls, as far as the tape knows it; nothing for what came in, or was written to since."""
    found: dict[tuple[Address, bool], Glue] = {}
    for call in calls:
        for tensor, version in zip(tensors_in([call.args, call.kwargs]), call.versions, strict=False):
            value = tape.computed(tensor) if tensor.is_floating_point() and version_of(tensor) == version else None
            if value is None:
                continue
            if (glue := _made(tape, value, place_of(tensor))) is not None:
                found[glue.place, value.diff] = glue
    return tuple(found.values())


def glue_within(tape: Tape, tensors: Iterable[Tensor]) -> dict[Address, Glue]:
    """Return what the forward of a custom function did to make these, as far as it is plain torch, by where they lie."""
    found: dict[Address, Glue] = {}
    for tensor in tensors:
        value = tape.storages.within(tensor)
        glue = _made(tape, value, place_of(tensor)) if value is not None else None
        if glue is not None and glue.program.calls:
            found[glue.place] = glue
    return found


@dataclass(frozen=True, slots=True)
class Behind:
    """A call that cannot be made again, and what led to its arguments. whole: to all of them, as far as they are numbers. deeper: of what
    these came out of, in turn, by the leaf that stands for it."""

    call: Opaque
    given: tuple[Glue, ...]
    whole: bool
    deeper: Mapping[int, Behind]


def behind(tape: Tape, call: Opaque, depth: int = 0) -> Behind:
    """Return what led to a call, as far as that is known."""
    whole, given, deeper = True, list[Glue](), dict[int, Behind]()
    held = {one.value: one for one in call.held if version_of(one.content) == one.writes}
    before = {value: one.of for value, one in held.items() if one.of is not None} | tape.leaves.opaque
    for one in dict.fromkeys(call.read):
        value = tape.values.get(one)
        glue = None if value is None else _made(tape, value, value.key[:4])
        if glue is None and one in held:
            content, origin = held[one].content, "cut" if held[one].computed else "data"
            program = Program((Leaf(one, None, origin, False),), (), one)
            glue = Glue(place_of(content), program, {one: content}, {one: place_of(content)}, False)
        whole &= glue is not None
        given += [] if glue is None else [glue]
        for leaf in () if glue is None or depth == DEEP else glue.program.leaves:
            if leaf.id in before and leaf.id not in deeper:
                deeper[leaf.id] = behind(tape, before[leaf.id], depth + 1)
    return Behind(call, tuple(given), whole, deeper)


def opened(tape: Tape, value: Value) -> tuple[Program, dict[int, Tensor]]:
    """Return the program of a value, and its leaves; where a custom function has returned one that is bad, what its forward did.

    Raises LookupError as the tape does.
    """
    program, tensors = tape.program(value)
    looked = set[int]()
    while bad := [
        one for one in program.leaves if one.origin == "opaque" and one.id not in looked and not bool(is_finite(tensors[one.id]))
    ]:
        leaf = bad[0].id
        looked.add(leaf)
        within = tape.storages.within(tensors[leaf], leaf)
        with contextlib.suppress(LookupError):
            part, own = tape.program(within) if within is not None else (EMPTY, {})
            if part.calls:
                program = _as_made(join([leading(part, leaf), program]).slice())
                tensors = {one.id: {**tensors, **own}[one.id] for one in program.leaves}
    return program, tensors


def _as_made(program: Program) -> Program:
    """Return a program with its calls in the order in which the tape has numbered what they make."""
    return replace(program, calls=tuple(sorted(program.calls, key=lambda call: min(out for out in call.outs if out is not None))))


EMPTY = Program((), (), -1)


def _made(tape: Tape, value: Value, place: Address) -> Glue | None:
    try:
        program, tensors = tape.program(value)
    except LookupError:
        return None
    return Glue(place, program, tensors, tape.places(tensors), value.diff) if tensor_bytes(tensors) <= KEPT_BYTES else None

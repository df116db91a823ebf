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
from functools import cached_property

from torch import Tensor

from nanscope.capture.entries import Opaque, Value
from nanscope.capture.modules import KEPT_BYTES, Address, ModuleCall, place_of, tensors_in, version_of
from nanscope.capture.tape import Tape
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.local import local
from nanscope.program.numbers import is_finite, tensor_bytes
from nanscope.program.program import EMPTY, Program, join

DEEP = 4  # calls, one behind the other, that are gone back over


@dataclass(frozen=True)  # without slots: what is derived is kept
class Between:
    """What the trainer's own lines made, and handed to one or more modules: one program of all that. tensors, places: its leaves, and where
    they lay."""

    program: Program
    tensors: Mapping[int, Tensor]
    places: Mapping[int, Address]

    @cached_property
    def _behind(self) -> dict[int, int]:
        """The leaves behind each value, as bits."""
        found = {leaf.id: 1 << number for number, leaf in enumerate(self.program.leaves)}
        for call in self.program.calls:
            read = 0
            for value in call.inputs():
                read |= found[value]
            found.update(dict.fromkeys((out for out in call.outs if out is not None), read))
        return found

    def has(self, value: int) -> bool:
        """Is a value made in it, or one of its leaves?"""
        return value in self._behind

    def leaves_of(self, value: int) -> list[int]:
        """Return the leaves that a value was made of."""
        behind = self._behind[value]
        return [leaf.id for number, leaf in enumerate(self.program.leaves) if behind >> number & 1]


@dataclass(frozen=True)
class Glue:
    """What made an argument of a module. place: where that lies. between, value: that in it. diff: a gradient flows through it; what is
    detached lies in the same place.
    """

    place: Address
    between: Between
    value: int
    diff: bool = True

    @cached_property
    def program(self) -> Program:
        """What made it, and nothing else."""
        return self.between.program.slice(self.value)

    @cached_property
    def _leaves(self) -> list[int]:
        return self.between.leaves_of(self.value)

    @property
    def tensors(self) -> dict[int, Tensor]:
        """The leaves of the program."""
        return {leaf: self.between.tensors[leaf] for leaf in self._leaves}

    @property
    def places(self) -> dict[int, Address]:
        """Where they lay."""
        return {leaf: self.between.places[leaf] for leaf in self._leaves}

    def apart(self) -> Glue:
        """Return the same, which holds nothing that others were made of."""
        return replace(self, between=Between(self.program, self.tensors, self.places))

    def is_whole(self) -> bool:
        """Is all that the program reads still there?"""
        return all(local(tensor) is not None for tensor in self.tensors.values())

    def leading_to(self, argument: int) -> Program:
        """Return the program with its result under another id."""
        return leading(self.program, argument)


def betweens(glue: Iterable[Glue]) -> list[Between]:
    """Return what some arguments were made in, each once."""
    return list({id(one.between): one.between for one in glue}.values())


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
    """Return what made the arguments of calls, as far as the tape knows it; nothing for what came in, or was written to since.

    They are taken from the tape together: where a model is called part by part, each is made of those before it.
    """
    found: dict[tuple[Address, bool], Value] = {}
    for call in calls:
        for tensor, version in zip(tensors_in([call.args, call.kwargs]), call.versions, strict=False):
            value = tape.computed(tensor) if tensor.is_floating_point() and version_of(tensor) == version else None
            if value is not None:
                found[place_of(tensor), value.diff] = value
    program, tensors = tape.together(found.values())
    if tensor_bytes(tensors) > KEPT_BYTES:
        alone = (_made(tape, value, place) for (place, _), value in found.items())
        return tuple(one for one in alone if one is not None)
    between = Between(program, tensors, tape.places(tensors))
    return tuple(Glue(place, between, value.id, diff) for (place, diff), value in found.items() if between.has(value.id))


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
            glue = Glue(place_of(content), Between(program, {one: content}, {one: place_of(content)}), one, False)
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


def _made(tape: Tape, value: Value, place: Address) -> Glue | None:
    try:
        program, tensors = tape.program(value)
    except LookupError:
        return None
    held = tensor_bytes(tensors) <= KEPT_BYTES
    return Glue(place, Between(program, tensors, tape.places(tensors)), value.id, value.diff) if held else None

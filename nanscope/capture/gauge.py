"""The gauge, one reading a step: how near the exponents of a loss came to overflow, how far the policy has moved, and how far the sampler
is from the trainer; from tensors that the tape holds anyway.

    gauged = gauge.read(program, tape.tensor)          a few reductions, one tensor of numbers that stays on the device
    gauged.told(gauged.numbers.tolist())               once somebody fetches them, with what else crosses in that step

A trend towards zero headroom is the warning before the incident: exp overflows above 88.72 nats in float32, 11.09 in float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.reading import Extremes, Mean, Reading, Spot
from nanscope.locate.names import Names
from nanscope.objective.mismatch import Mismatch, mismatch_sums
from nanscope.objective.settings import Correction
from nanscope.program.calls import Call, Ref, refs
from nanscope.program.flow import element_flow
from nanscope.program.joins import begun_at_joins
from nanscope.program.local import is_plain
from nanscope.program.numbers import exponent_limit
from nanscope.program.ops import CLAMPS, DIFFERENCES, FILLS, NATURAL_EXPONENTIALS, NEGATIONS, SHIFTS, Flow
from nanscope.program.program import Program
from nanscope.roles import Role

Pair = tuple[int, int]  # ids: log-probs of the trainer, and of the sampler
Clip = tuple[int, float, float]  # clipped ratio, low, high

WIDEST = 1 << 20  # values that one call reads and makes


@dataclass(frozen=True, slots=True)
class Dials:
    """Where to read the gauge in a program: ids of values.

    exponents: what e is raised to, and where. masks. clips. policy: exponents of the policy's ratio. kls, entropies: what the loss forms
    of these. compared: pairs whose difference the loss takes. rollouts, own: what else may be such a pair.
    weights: between sampler and trainer.
    """

    exponents: tuple[tuple[int, Spot], ...] = ()
    masks: tuple[int, ...] = ()
    clips: tuple[Clip, ...] = ()
    policy: tuple[int, ...] = ()
    kls: tuple[int, ...] = ()
    entropies: tuple[int, ...] = ()
    compared: tuple[Pair, ...] = ()
    rollouts: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()

    @staticmethod
    def of(program: Program) -> Dials:
        """Find them; once for each structure, since names have to be looked up."""
        namer = Names(program)
        exponents: list[tuple[int, Spot]] = []
        masks: list[int] = []
        policy: list[int] = []
        for call in program.calls:
            value = call.args[0].id if call.args and isinstance(call.args[0], Ref) else None
            # What is only moved on, or turned round, counts nothing where it lies.
            lies = call.args if element_flow(call) is Flow.POINTWISE and call.name not in NEGATIONS else call.args[1:]
            masks += [mask for mask in refs(lies) if namer.says_mask(mask) and _keeps(program, mask)]
            if value is not None and call.name in NATURAL_EXPONENTIALS:
                exponents.append((value, _spot(program, call, namer.name(value))))
                if any(out is not None and namer.named(out) is Role.RATIO for out in call.outs):
                    policy.append(value)
        values = [*(leaf.id for leaf in program.leaves), *(out for call in program.calls for out in call.outs if out is not None)]
        roles = {value: namer.named(value) for value in values}
        kls, entropies, rollouts, old, own, weights = (
            tuple(value for value in values if roles[value] is role)
            for role in (Role.KL, Role.ENTROPY, Role.ROLLOUT_LOG_PROBS, Role.OLD_LOG_PROBS, Role.LOG_PROBS, Role.IS_WEIGHT)
        )
        compared = _differences(program, roles)
        once = tuple(dict.fromkeys(masks))
        return Dials(
            tuple(exponents),
            once,
            clips_of(program),
            tuple(policy),
            kls,
            entropies,
            compared,
            () if compared else rollouts,
            old + own,
            weights,
        )

    def mapped(self, number: Callable[[int], int]) -> Dials:
        """Return the same under other numbers; what has none, −1, is left out."""

        def all_of(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(known for value in values if (known := number(value)) >= 0)

        return Dials(
            tuple((known, spot) for value, spot in self.exponents if (known := number(value)) >= 0),
            all_of(self.masks),
            tuple((known, low, high) for value, low, high in self.clips if (known := number(value)) >= 0),
            all_of(self.policy),
            all_of(self.kls),
            all_of(self.entropies),
            tuple((number(own), number(other)) for own, other in self.compared if min(number(own), number(other)) >= 0),
            all_of(self.rollouts),
            all_of(self.own),
            all_of(self.weights),
        )

    def wanted(self, own: bool) -> set[int]:
        """All that is read, by id; log-probs that may be part of a mismatch only where there may be one. own: there is, beside the loss."""
        found = {*self.masks, *self.policy, *self.kls, *self.entropies, *self.rollouts, *(self.own if self.rollouts or own else ())}
        found.update(self.weights if self.rollouts or self.compared or own else ())
        found |= {value for value, _ in self.exponents} | {value for value, _, _ in self.clips}
        return found | {value for pair in self.compared for value in pair}

    def pruned(self, values: Mapping[int, Tensor]) -> Dials:
        """Return them without the masks of no shape that is read here, where one is; a loop that samples makes one a token."""
        read = (value for value in self.wanted(True).difference(self.masks) if value in values)
        shapes = {values[value].shape for value in read}
        fitting = tuple(mask for mask in self.masks if mask in values and values[mask].shape in shapes)
        return replace(self, masks=fitting or self.masks)


def clips_of(program: Program, among: Container[int] | None = None) -> tuple[Clip, ...]:
    """What a program clips, and to what: that may be other numbers in each step. among: values; by default those that are bounded as a
    ratio is."""
    found = (clip_of(value, *call.args[1:]) for call in program.calls if (value := clamped(call)) is not None)
    return tuple(clip for clip in found if clip is not None and (_bounds_a_ratio(clip) if among is None else clip[0] in among))


def clamped(call: Call) -> int | None:
    """Return what a call bounds from both sides, None if it does not."""
    between = call.name in CLAMPS and len(call.args) == 3
    return call.args[0].id if between and isinstance(call.args[0], Ref) else None


def clip_of(value: int, low: object, high: object) -> Clip | None:
    """Return what such a call clips, None if its bounds are no numbers."""
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
        return None
    return value, float(low), float(high)


def _bounds_a_ratio(clip: Clip) -> bool:
    _, low, high = clip
    return 0 < low < 1 < high


def _keeps(program: Program, mask: int) -> bool:
    """Is a mask true where a token counts? Not what is made by turning one round, and not what says where something is filled in."""
    made = program.maker(mask)
    turned = made is not None and made.name in NEGATIONS | SHIFTS
    return not turned and not any(call.name in FILLS and call.args[1] == Ref(mask) for call in program.readers(mask))


def _spot(program: Program, call: Call, name: str | None) -> Spot:
    site = program.site_of(call)
    if site is None:
        return Spot("", 0, 0, "", call.name, name)
    return Spot(site.file, site.line, site.column, site.function, call.name, name or next(iter(site.args), None))


def _placed(program: Program) -> dict[int, int]:
    """The values of a program by where they first stand in it, as one number: who reads or makes them, and as which one. What stands there
    means the same in every program of the structure."""
    found: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        for position, value in enumerate((*call.outs, *call.inputs())):
            if value is not None:
                found.setdefault(value, index * WIDEST + position)
    return found


def _value_at(program: Program, place: int) -> int:
    index, position = divmod(place, WIDEST)
    call = program.calls[index]
    if position < len(call.outs):
        out = call.outs[position]
        return -1 if out is None else out
    return next(islice(call.inputs(), position - len(call.outs), None), -1)


def _differences(program: Program, roles: Mapping[int, Role | None]) -> tuple[Pair, ...]:
    """Pairs that the loss itself subtracts from each other; those of the old policy, which has sampled, where there are such."""
    pairs: list[tuple[Role | None, Pair]] = []
    for call in program.calls:
        ids = [arg.id for arg in call.args[:2] if isinstance(arg, Ref)]
        if call.name in DIFFERENCES and len(ids) == 2:
            for own, other in (ids, ids[::-1]):
                if roles.get(other) is Role.ROLLOUT_LOG_PROBS and roles.get(own) in (Role.OLD_LOG_PROBS, Role.LOG_PROBS):
                    pairs.append((roles.get(own), (own, other)))
    old = [pair for role, pair in pairs if role is Role.OLD_LOG_PROBS]
    return tuple(dict.fromkeys(old or [pair for _, pair in pairs]))


@dataclass(frozen=True, slots=True)
class Beside:
    """What stood beside a loss that need not read it. tensors: of the batch, by role. correction: tells the one between sampler and trainer
    that is in force, None if there is none; it is asked where there is something to compare."""

    tensors: Mapping[Role, Tensor]
    correction: Callable[[], Correction | None] = lambda: None


NOTHING = Beside({})


class Gauged:
    """What was computed of one backward pass. numbers: float32, on the device; None where there was nothing to read. unseen: an exponent of
    the loss was not held."""

    __slots__ = ("_parts", "_unseen", "numbers")

    def __init__(self, parts: Sequence[tuple[_Part, Sequence[Tensor]]], unseen: bool = False) -> None:
        self._unseen = unseen
        self._parts = [(part, len(numbers) if len(numbers) > 1 else numbers[0].numel()) for part, numbers in parts]
        every = [one for _, numbers in parts for one in numbers]
        alike = all(one.dtype is torch.float32 and not one.dim() for one in every)
        flat = torch.stack(every) if alike and every else torch.cat([one.reshape(-1).float() for one in every]) if every else None
        self.numbers: Tensor | None = flat

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return sum(size for _, size in self._parts)

    def told(self, numbers: Sequence[float]) -> Reading:
        """Return the reading. numbers: those that were computed, on the host."""
        extremes: dict[Spot, Extremes] = {}
        found: dict[str, Any] = {}
        start = 0
        for part, size in self._parts:
            name, content = part(numbers[start : start + size])
            start += size
            if isinstance(content, Extremes):
                extremes[content.spot] = extremes[content.spot].joined(content) if content.spot in extremes else content
            else:
                found[name] = found[name].joined(content) if name in found else content
        return Reading(tuple(extremes.values()), unseen=self._unseen, **found)


_Part = Callable[[Sequence[float]], tuple[str, Extremes | Mean | Mismatch | float | None]]  # what some of the numbers say, of which field

KEPT_DIALS = 64  # structures of programs that are remembered: a loss over sequences of any length has one for each


class Gauge:
    """Reads programs, and remembers where to look in those of the structures seen last. dials: where one looks in the last one."""

    def __init__(self) -> None:
        self.dials = Dials()
        self._dials: dict[tuple[tuple[str, int], ...], Dials] = {}  # their values by place

    def read(self, program: Program, held: Callable[[int], Tensor | None], beside: Beside = NOTHING) -> Gauged:
        """Compute what there is to read of a step, and fetch nothing: of what many tensors were put together to, not of each of them. held:
        what is known of a value, by its id."""
        program = begun_at_joins(program)
        key = tuple((call.op, call.site) for call in program.calls)
        known, own = self._dials.pop(key, None), Role.ROLLOUT_LOG_PROBS in beside.tensors
        dials = Dials.of(program) if known is None else known.mapped(partial(_value_at, program))
        if dials.clips:
            dials = replace(dials, clips=clips_of(program, [value for value, _, _ in dials.clips]))
        values = {value: tensor for value in dials.wanted(own or known is None) if (tensor := held(value)) is not None}
        if known is None:
            placed, self.dials = _placed(program), dials.pruned(values)
            known = self.dials.mapped(lambda value: placed.get(value, -1))
        else:
            self.dials = dials
        self._dials[key] = known
        if len(self._dials) > KEPT_DIALS:
            del self._dials[next(iter(self._dials))]
        return read_gauge(dials, values, beside)


def read_gauge(dials: Dials, values: Mapping[int, Tensor], beside: Beside = NOTHING, unseen: bool = False) -> Gauged:
    """Compute it of the tensors of a step; what is not held, or is more than memory in here, is not seen. unseen: there is more of that."""
    return Gauged(list(_Sheet(dials, values, beside).parts()), unseen or any(value not in values for value, _ in dials.exponents))


def topmost(program: Program, values: Mapping[int, Tensor], spot: Spot, masked: bool) -> tuple[int, int] | None:
    """Return the value that is raised to e at a spot, and the flat index of its largest element on masked, or on counted, tokens; None if
    the program has none there. values: of its run. Waits for the device."""
    dials = Dials.of(program)
    sheet = _Sheet(dials, values, NOTHING)
    tops = [(*top, value) for value, own in dials.exponents if own == spot and (top := sheet.top(value, masked)) is not None]
    _, flat, value = max(tops, default=(0.0, 0, -1))
    return None if value < 0 else (value, flat)


class _Sheet:
    """What is read of one step."""

    def __init__(self, dials: Dials, values: Mapping[int, Tensor], beside: Beside) -> None:
        self._dials, self._values, self._beside = dials, values, beside
        self._masks: dict[tuple[torch.Size, torch.device], tuple[Tensor, Tensor] | None] = {}

    def parts(self) -> Iterator[tuple[_Part, Sequence[Tensor]]]:
        """Yield what is computed, and what it will say."""
        for value, spot in self._dials.exponents:
            operand = self._floating(value)
            if operand is not None:
                yield self._exponent(operand, spot)
        yield from self._clip()
        yield from self._mean("kl", self._dials.kls)
        yield from self._mean("entropy", self._dials.entropies)
        yield from self._mean("kl_old", self._dials.policy, lambda log_ratio: log_ratio.expm1() - log_ratio)
        yield from self._mismatch()

    def _value(self, value: int) -> Tensor | None:
        tensor = self._values.get(value)
        if tensor is None or not is_plain(tensor) or tensor.is_meta or not tensor.numel():
            return None
        return tensor.detach()

    def _floating(self, value: int) -> Tensor | None:
        tensor = self._value(value)
        return tensor if tensor is not None and tensor.is_floating_point() else None

    def _counted(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """The tokens that every mask of that shape lets through, and the others; None if there is no such mask."""
        key = like.shape, like.device
        if key not in self._masks:
            masks = [mask for value in self._dials.masks if (mask := self._value(value)) is not None]
            fitting = [mask.bool() for mask in masks if (mask.shape, mask.device) == key]
            counted = fitting[0] if fitting else None
            for mask in fitting[1:]:
                counted = counted & mask if counted is not None else mask
            self._masks[key] = None if counted is None else (counted, ~counted)
        return self._masks[key]

    def top(self, value: int, masked: bool) -> tuple[float, int] | None:
        """The largest element of a value on masked, or on counted, tokens, and its flat index; None if it has none there."""
        operand = self._floating(value)
        split = None if operand is None else self._counted(operand)
        if operand is None or (masked and split is None):
            return None
        there = operand if split is None else torch.where(split[masked], operand, -math.inf)
        flat = int(there.flatten().argmax())
        height = float(there.flatten()[flat])
        return (height, flat) if math.isfinite(height) else None

    def _exponent(self, operand: Tensor, spot: Spot) -> tuple[_Part, Sequence[Tensor]]:
        limit, split = exponent_limit(operand.dtype), self._counted(operand)
        if split is None:
            return lambda told: ("extremes", Extremes(spot, limit, *_extent(told))), torch.aminmax(operand)
        numbers = [one for tokens in split for one in _extremes(operand, tokens)]
        return lambda told: ("extremes", Extremes(spot, limit, *_extent(told[:2]), *_extent(told[2:]))), numbers

    def _clip(self) -> Iterator[tuple[_Part, Sequence[Tensor]]]:
        for value, low, high in self._dials.clips:
            ratio = self._value(value)
            if ratio is not None and _bounds_a_ratio((value, low, high)):
                out, split = (ratio < low) | (ratio > high), self._counted(ratio)
                numbers = [_count(out)] if split is None else [_count(out & split[0]), _count(split[0])]
                yield partial(_clipped, ratio.numel()), numbers
                return

    def _mean(
        self, name: str, candidates: Iterable[int], made: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Iterator[tuple[_Part, Sequence[Tensor]]]:
        """The mean of the first of some values that has a number for each token; where none has, of the first that is one number."""
        held = [tensor for value in candidates if (tensor := self._floating(value)) is not None]
        chosen = next((one for one in held if self._counted(one) is not None), next(iter(held), None))
        if chosen is None:
            return
        split, numbers, whole = self._counted(chosen), made(chosen), chosen.numel()
        sums = [numbers.sum()] if split is None else [torch.where(split[0], numbers, 0.0).sum(), _count(split[0])]
        yield lambda told: (name, Mean(told[0], _tokens(told, whole))), sums

    def _mismatch(self) -> Iterator[tuple[_Part, Sequence[Tensor]]]:
        """Of each pair that the loss subtracts, else of the first two that may be one; else of what stood beside the loss."""
        pairs = [(self._floating(own), self._floating(other)) for own, other in self._dials.compared]
        taken = self._beside.tensors
        others = [self._floating(value) for value in self._dials.rollouts] + [taken.get(Role.ROLLOUT_LOG_PROBS)]
        if not any(own is not None and other is not None for own, other in pairs):
            owners = [taken.get(Role.OLD_LOG_PROBS), *map(self._floating, self._dials.own)]
            pairs = [(own, other) for other in others for own in owners if _alike(own, other)][:1]
        fitting = [(own, other) for own, other in pairs if own is not None and other is not None and _alike(own, other)]
        correction = self._beside.correction() if fitting else None
        for own, other in fitting:
            split, mask = self._counted(own), taken.get(Role.MASK)
            whole = mask is not None and _alike(own, mask)  # that of the loss may have lost tokens for this very mismatch
            counted = mask.bool() if whole and mask is not None else None if split is None else split[0]
            yield lambda told: ("mismatch", Mismatch.of(told)), [mismatch_sums(own, other, counted, correction, self._weight(own))]

    def _weight(self, like: Tensor) -> Tensor | None:
        """What the loss multiplies tokens by for what their sampler says, one number a token or a row; None if that is not seen."""
        held = (self._floating(value) for value in self._dials.weights)
        fitting = [one for one in held if one is not None and one.shape in (like.shape, (*like.shape[:1], *[1] * (like.dim() - 1)))]
        return next((one for one in reversed(fitting) if one.device == like.device), None)  # the last one is what has been truncated


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and (one.shape, one.device) == (other.shape, other.device)


def _count(tokens: Tensor) -> Tensor:
    return tokens.sum(dtype=torch.float32)  # as the numbers that it stands among


def _tokens(told: Sequence[float], whole: int) -> float:
    """How many are counted: all, where it is not told."""
    return told[1] if len(told) > 1 else whole


def _clipped(whole: int, told: Sequence[float]) -> tuple[str, float | None]:
    tokens = _tokens(told, whole)
    return "clipped", told[0] / tokens if tokens else None


def _extremes(operand: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(tokens, operand, math.inf).amin(), torch.where(tokens, operand, -math.inf).amax()


def _extent(told: Sequence[float]) -> tuple[float | None, float | None]:
    """The largest and the smallest; None where there was no element at all."""
    low, high = told
    return (high, low) if not low > high else (None, None)

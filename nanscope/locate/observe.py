"""The case: one view on an origin, whether it was replayed or only observed, with what the rules ask about it.

A case travels: what a file cannot recompute (an origin inside the model, in an update, in a clip) goes into the snapshot as JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanscope.locate.facts import vanishing_eps
from nanscope.locate.location import Location, Origin, Phase, Step
from nanscope.locate.names import Namer
from nanscope.plain import show
from nanscope.program.calls import Call, Computes, Site
from nanscope.program.numbers import at, exponent_limit, headroom_bits
from nanscope.program.ops import Flow, base_name, carries, flow_of
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.roles import Role, last_word
from nanscope.snapshot.step import Snapshot
from nanscope.text import show_index, unravel

EXPS = ("exp", "expm1", "exp2")

LOGS = ("log", "log2", "log10", "log1p", "xlogy")

CLIPPED = "picked the other side"


@dataclass(frozen=True, slots=True)
class Place:
    """The origin as reports show it. See `locate.Origin`; headroom in bits, negative beyond the dtype's range.

    limit: for an exponential, the largest exponent that its dtype can take, in nats.
    """

    op: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    value: float
    dtype: str
    variable: str | None
    expression: str | None
    role: str | None
    masked: bool | None
    masked_by: str | None
    file: str | None
    line: int | None
    function: str | None
    module: str | None
    operands: tuple[tuple[str, float], ...]
    source: tuple[tuple[int, str], ...]
    headroom: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """One step of the chain, in words and numbers."""

    text: str
    line: int | None
    value: float
    backward: bool
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Story:
    """What others have to do with a case. poisoned_at: the earlier step whose update made weights non-finite. source: rank and sentence of
    the incident of another rank in the same step, "" if there is none."""

    poisoned_at: int | None = None
    source: str = ""


NO_STORY = Story()


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules ask of the program around an origin, kept apart so that it can travel without the program.

    coefficient: a zero advantage or coefficient multiplies the origin. ancestors: operators that made its first operand.
    mask_denominator: it divides by a sum over a mask. literal_denominator: by a number of the code.
    eps_underflow: an epsilon of the code rounds to nothing on the way. whole: no element is finite. unwritten: memory that nobody wrote.
    multiplied: a mask is multiplied onto it. plogp: a logarithm that is multiplied by what it was taken of. setting: it divides by a
    number of the code or by a scalar that came in.
    clip: what a clip by norm made of it, "inf" or "nan". optimizer: its class, of an update. weight: what was updated.
    dropped: forward takes its value out. zero_is_mask: the origin itself is a product with a mask that is 0.
    extent: how much of a tensor that came in is bad. suspect: everything is finite and the step is ruined. allreduce: this rank's own
    backward is fine, the gradients are not.
    """

    coefficient: bool = False
    ancestors: tuple[str, ...] = ()
    mask_denominator: bool = False
    literal_denominator: bool = False
    setting: bool = False
    whole: bool = False
    eps_underflow: bool = False
    unwritten: bool = False
    multiplied: bool = False
    plogp: bool = False
    optimizer: str = ""
    weight: str = ""
    clip: str = ""
    dropped: bool = False
    zero_is_mask: bool = False
    extent: str = ""
    suspect: bool = False
    allreduce: bool = False
    story: Story = NO_STORY

    @staticmethod
    def of(location: Location, program: Program, run: Run) -> Facts:
        origin = location.origin
        call = program.calls[origin.call] if origin.call is not None else None
        literal = call is not None and base_name(call.op) == "div" and len(call.args) > 1 and isinstance(call.args[1], (int, float))
        own = program.computes is not Computes.GRADIENT  # what comes into a backward is what forward saved, and no setting
        return Facts(
            coefficient=origin.coefficient is not None,
            ancestors=tuple(sorted(_ancestors(program, origin.operands[0].id))) if origin.operands else (),
            mask_denominator=len(origin.operands) > 1 and _from_mask(program, run, origin.operands[1].id),
            literal_denominator=literal,
            setting=literal or (own and len(origin.operands) > 1 and _came_in(program, origin.operands[1].id)),
            dropped=bool(origin.drops),
            zero_is_mask=origin.op == "mul" and any(drop.call == origin.call for drop in origin.drops),
            extent=_extent(run.values[origin.value_id], origin.index) if origin.call is None else "",
            whole=not bool(torch.isfinite(run.values[origin.value_id]).any()),
            multiplied=any(drop.how == "mask" for drop in origin.drops) and _meets_zero(location, program),
            plogp=origin.op in LOGS and call is not None and _times_own_operand(program, call),
            unwritten=origin.leaf is not None and origin.leaf.made_by == "empty",
            eps_underflow=origin.call is not None and bool(vanishing_eps(program, run.values, origin.call)),
        )


@dataclass(frozen=True, slots=True)
class Case:
    phase: Phase
    place: Place
    chain: tuple[Link, ...]
    facts: Facts

    @staticmethod
    def of(location: Location, program: Program, run: Run) -> Case:
        """The case of an origin that was replayed."""
        chain = tuple(Link(_link_words(s), s.line, s.value, s.backward, s.file) for s in location.chain)
        first = next((position for position, link in enumerate(chain) if link.backward), None)
        if first is not None and location.origin.born:
            link = chain[first]
            if math.isinf(location.origin.value) and location.origin.op in EXPS:
                words = f"{link.text} (0 · inf in {location.origin.op}'s backward)"
                chain = (*chain[:first], replace(link, text=words), *chain[first + 1 :])
        return Case(location.phase, _place(location.origin, program), chain, Facts.of(location, program, run))

    @staticmethod
    def observed(snapshot: Snapshot, seen: dict[str, Any]) -> Case:
        """The case of an origin that was seen in the process and is not in the file's program."""
        origin = dict(seen.get("origin") or {})
        default = Phase.FORWARD if snapshot.reached.loss is not None and not math.isfinite(snapshot.reached.loss) else Phase.BACKWARD
        phase = Phase(seen["phase"]) if seen.get("phase") in set(Phase) else default
        chain = tuple(
            Link(str(text), None if line is None else int(line), float(value), bool(backward), None if file is None else str(file))
            for text, line, value, backward, file in seen.get("chain") or ()
        )
        known = {name: value for name, value in (seen.get("facts") or {}).items() if name in Facts.__slots__ and name != "story"}
        facts = Facts(**{**known, "ancestors": tuple(str(op) for op in known.get("ancestors") or ())})
        return Case(phase, _place_from_json(origin), chain, facts)

    def with_seen(self, seen: dict[str, Any], story: Story) -> Case:
        """The case with what only the process could see: a clip by norm, the optimizer's class, what an earlier step did."""
        known = {key: str(seen.get(key) or getattr(self.facts, key)) for key in ("clip", "optimizer", "weight")}
        flags = {key: bool(seen.get(key)) for key in ("suspect", "allreduce")}
        facts = replace(self.facts, story=story, **flags, **known)  # type: ignore[arg-type]
        place = replace(self.place, role=str(Role.GRAD)) if facts.clip == "inf" else self.place
        if seen.get("masked") is not None:
            place = replace(place, masked=bool(seen["masked"]))
        return replace(self, facts=facts, place=place)

    def number(self, position: int) -> float:
        """The value of an operand, NaN if there is none."""
        return self.place.operands[position][1] if position < len(self.place.operands) else math.nan


def _meets_zero(location: Location, program: Program) -> bool:
    """Is it a product with 0 that makes NaN of an infinity, and not something on the way there, a softmax for instance?"""
    if math.isnan(location.origin.value):
        return True
    producers = program.producers()
    for step in location.chain:
        if math.isnan(step.value) and not step.backward:
            index = producers.get(step.value_id)
            op = program.calls[index].op if index is not None else ""
            return flow_of(op) is Flow.MATMUL or base_name(op) in ("mul", "addcmul", "addmm", "einsum")
    return True


def _extent(tensor: Tensor, index: tuple[int, ...]) -> str:
    """How much of a tensor is non-finite beside the element that was named."""
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    if count <= 1:
        return ""
    if count == bad.numel():
        return "all of it"
    row = bad[index[0]] if len(index) > 1 else bad
    if len(index) > 1 and bool(row.all()) and count == row.numel():
        return f"the whole row {index[0]}"
    return f"{count} of {bad.numel()} elements"


def _link_words(step: Step) -> str:
    return f"{last_word(step.variable) if step.variable else step.op}{show_index(step.index)}"


def _ancestors(program: Program, value: int) -> set[str]:
    """The operators that a value was made by, a few steps back."""
    producers = program.producers()
    found: set[str] = set()
    stack = [(value, 0)]
    while stack:
        current, depth = stack.pop()
        index = producers.get(current)
        if index is None or depth > 4:
            continue
        found.add(base_name(program.calls[index].op))
        stack += [(v, depth + 1) for v in program.calls[index].inputs()]
    return found


def _times_own_operand(program: Program, call: Call) -> bool:
    """Is the logarithm multiplied by the number it was taken of, p · log p?"""
    consumers = program.consumers()
    operand = next(iter(call.inputs()), None)
    value = call.outs[0]
    for _ in range(6):
        readers = [program.calls[index] for index in consumers.get(value, ())] if value is not None else []
        if any(base_name(reader.op) == "mul" and operand in set(reader.inputs()) for reader in readers):
            return True
        following = [r for r in readers if flow_of(r.op) in (Flow.POINTWISE, Flow.MOVE)]
        if not following:
            return False
        value = following[0].outs[0]
    return False


def _came_in(program: Program, value: int) -> bool:
    """Is a value one that came in as it is, a temperature for instance, and was at most reshaped?"""
    producers = program.producers()
    for _ in range(12):
        index = producers.get(value)
        if index is None:
            return True
        call = program.calls[index]
        if not carries(call.op):
            return False
        value = next(iter(call.inputs()), value)
    return False


def _from_mask(program: Program, run: Run, value: int) -> bool:
    """Is a value a sum over a mask?"""
    producers, namer = program.producers(), Namer(program)
    if "sum" not in _ancestors(program, value):
        return False
    for _ in range(12):
        made = producers.get(value)
        if made is not None and base_name(program.calls[made].op) in ("sub", "rsub"):
            return False  # a count less one
        if namer.says_mask(value):
            return True
        index = producers.get(value)
        if index is None:
            tensor = run.values[value]
            return tensor.dim() > 0 and bool(((tensor == 0) | (tensor == 1)).all())
        following = next(iter(program.calls[index].inputs()), None)
        if following is None:
            return False
        value = following
    return False


def _place(origin: Origin, program: Program) -> Place:
    site = origin.site
    masked_by = next((_drop_words(drop.how, drop.name) for drop in origin.drops if drop.how in ("mask", "select")), None)
    if masked_by is None and origin.masked and origin.drops:
        masked_by = _drop_words(origin.drops[-1].how, origin.drops[-1].name)
    operands = tuple((operand_name(origin, position), operand.value) for position, operand in enumerate(origin.operands))
    call = program.calls[origin.call] if origin.call is not None else None
    headroom = limit = None
    if origin.op in EXPS and operands:
        limit = round(exponent_limit(_dtype(origin.dtype)), 2)
        headroom = round((exponent_limit(_dtype(origin.dtype)) - operands[0][1]) / math.log(2), 1)
    elif math.isfinite(origin.value) and origin.value:
        headroom = round(headroom_bits(abs(origin.value), _dtype(origin.dtype)), 1)
    return Place(
        op=origin.op,
        index=origin.index,
        shape=origin.shape,
        value=origin.value,
        dtype=origin.dtype,
        variable=_called(origin),
        expression=site.expression or None if site else None,
        role=str(origin.role) if origin.role else None,
        masked=origin.masked,
        masked_by=masked_by,
        file=site.file if site else None,
        line=site.line if site else None,
        function=site.function if site else None,
        module=call.module or None if call else None,
        operands=operands,
        source=site.source if site else (),
        headroom=headroom,
        limit=limit,
    )


def _called(origin: Origin) -> str | None:
    """A variable by its last word, a weight by its full name."""
    if origin.variable is None or (origin.leaf is not None and origin.leaf.origin == "parameter"):
        return origin.variable
    return last_word(origin.variable)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, torch.float32)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32


_OPERANDS = {"addcdiv": ("weight", "numerator", "denominator"), "addcmul": ("value", "factor", "factor")}  # no source names these


def operand_name(origin: Origin, position: int) -> str:
    operand = origin.operands[position]
    if operand.name:
        return last_word(operand.name)
    words = origin.site.args if origin.site else ()
    known = _OPERANDS.get(origin.op, ())
    if position < len(known):
        return known[position]
    return words[position] if position < len(words) else f"operand {position + 1}"


def _drop_words(how: str, name: str | None) -> str:
    return {
        "mask": f"multiplied by {name or 'a mask'} = 0",
        "select": f"not selected by {name or 'an index'}",
        "clip": f"{name} {CLIPPED}",
        "clamp": "replaced by a bound of clamp",
        "replace": f"replaced by {name}",
    }[how]


def observation(location: Location, program: Program, run: Run) -> dict[str, Any]:
    """Return a location as JSON data: what a file keeps of an origin that its program does not hold."""
    case = Case.of(location, program, run)
    return {
        "phase": str(case.phase),
        "origin": place_json(case.place),
        "chain": [[link.text, link.line, show(link.value), link.backward, link.file] for link in case.chain[:200]],
        "facts": asdict(case.facts),
    }


def _element(op: str, tensor: Tensor, flat: int, role: Role, site: Site | None = None) -> dict[str, Any]:
    """Return the place of an element that only a watcher saw, as JSON data: what the observations below share."""
    found = {
        "op": op,
        "index": list(unravel(flat, tensor.shape)),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "value": show(at(tensor, flat)),
        "role": str(role),
        "masked": None,
        "operands": [],
    }
    if site is not None:
        found |= {"file": site.file, "line": site.line, "function": site.function, "source": [list(line) for line in site.source]}
    return found


def weight_observation(name: str | None, parameter: Tensor, flat: int, group: dict[str, Any]) -> dict[str, Any]:
    """Return what an update did to a weight, as JSON data."""
    eps = group.get("eps")
    small = isinstance(eps, float) and float(torch.tensor(eps, dtype=parameter.dtype)) == 0.0
    grad = parameter.grad
    operands = [] if grad is None else [["gradient", show(at(grad.detach(), flat))]]
    origin = _element("addcdiv" if eps is not None else "add", parameter.detach(), flat, Role.OPTIMIZER)
    return {"origin": origin | {"variable": name, "operands": operands}, "facts": {"eps_underflow": small}}


def made_observation(
    op: str, result: Tensor, flat: int, site: Site | None, module: str, phase: Phase, name: str | None = None
) -> dict[str, Any]:
    """Return what a call inside the model, or its backward, made, as a snapshot keeps it. name: of what came in, not of what was made."""
    role = Role.WEIGHTS if phase is Phase.WEIGHTS else Namer.inside(site, module, set())
    origin = _element(op, result, flat, role, site) | {
        "variable": name or (site.name if site and phase is not Phase.INPUT else None),
        "expression": site.expression if site else None,
        "module": module,
    }
    return {"outside": True, "location": {"phase": str(phase), "origin": origin}}


def gradient_observation(op: str, name: str | None, gradient: Tensor, flat: int, site: Site | None) -> dict[str, Any]:
    """Return an element of a gradient that `op` was the ruin of, as JSON data. site: where that was."""
    origin = _element(op, gradient, flat, Role.GRAD, site)
    return {"phase": str(Phase.BACKWARD), "origin": origin | {"variable": name, "operands": [["gradient", origin["value"]]]}}


def place_json(p: Place) -> dict[str, Any]:
    return {
        "op": p.op,
        "variable": p.variable,
        "expression": p.expression,
        "role": p.role,
        "index": list(p.index),
        "shape": list(p.shape),
        "dtype": p.dtype,
        "value": show(p.value),
        "masked": p.masked,
        "masked_by": p.masked_by,
        "file": p.file,
        "line": p.line,
        "function": p.function,
        "module": p.module,
        "operands": [[name, show(value)] for name, value in p.operands],
        "source": [[line, text] for line, text in p.source],
        "headroom_bits": p.headroom,
        "limit_nats": p.limit,
    }


def _place_from_json(data: dict[str, Any]) -> Place:
    """Read what `place_json` wrote, and nothing else: a file may hold anything."""
    known: dict[str, Any] = {name: None if data.get(name) is None else str(data[name]) for name in _TEXTS}
    read: dict[str, Any] = {
        "op": str(data.get("op") or "unknown"),
        "index": tuple(int(n) for n in data.get("index") or ()),
        "shape": tuple(int(n) for n in data.get("shape") or ()),
        "value": float(data.get("value", math.nan)),
        "dtype": str(data.get("dtype") or ""),
        "operands": tuple((str(name), float(value)) for name, value in data.get("operands") or ()),
        "source": tuple((int(number), str(text)) for number, text in data.get("source") or ()),
        "headroom": None if data.get("headroom_bits") is None else float(data["headroom_bits"]),
        "limit": None if data.get("limit_nats") is None else float(data["limit_nats"]),
        "line": None if data.get("line") is None else int(data["line"]),
        "masked": None if data.get("masked") is None else bool(data["masked"]),
    }
    return Place(**{**known, **read})


_TEXTS = ("variable", "expression", "role", "masked_by", "file", "function", "module")

"""From a location to an observation: the origin in words and numbers, its chain, its facts; and what only a watcher saw."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanscope.locate.birth import birth_of
from nanscope.locate.blame import blame_of
from nanscope.locate.drops import Drop
from nanscope.locate.facts import facts_of
from nanscope.locate.layout import Layout, layout_of
from nanscope.locate.names import Names
from nanscope.locate.origin import NUMBER, Crossing, Element, Location
from nanscope.locate.piece import row_and_token
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Site, words_for
from nanscope.program.local import local
from nanscope.program.numbers import at, dtype_name, exponent_limit, headroom_bits
from nanscope.program.ops import CARRYING, COMMUTATIVE, EXPONENTIALS, FILLS, IN_ORDER, LITERALS, NUMBERED, SETS, SHIFTS, SIZED, WRITES
from nanscope.program.program import Program
from nanscope.program.whole import whole
from nanscope.roles import Role, last_word
from nanscope.snapshot.observation import LONGEST, Facts, Kind, Link, Observation, Origin, Phase
from nanscope.text import number, show_index, unravel

CLIPPED = "picked the other side"
REPLACED = "replaced by "  # another number, and that is what the loss counts
TOKENS = "all its tokens "  # are what is taken out, and the loss counts what was made of them


def observe(location: Location, trace: Trace) -> Observation:
    """Return the observation of an origin that a run of a program led to."""
    crossed = _without_what_stays(location.chain)[:LONGEST]
    chain = [Link(_link_words(step), step.line, step.value, step.backward, step.file) for step in crossed]
    first = next((position for position, link in enumerate(chain) if link.backward), None)
    if first is not None and location.origin.born and math.isinf(location.origin.value) and location.origin.op in EXPONENTIALS:
        chain[first] = replace(chain[first], text=f"{chain[first].text} (0 · inf in {location.origin.op}'s backward)")
    met = next((at for at, step in enumerate(crossed) if location.other is not None and step is location.chain[location.met]), None)
    if location.other is not None and met is not None:
        chain[met] = replace(chain[met], text=f"{chain[met].text} (also of {_birth_words(location.other)})")
    origin = replace(_told(_as_returned(location.origin, trace), trace.program), batch=_in_batch(location.origin, trace))
    facts, blame = facts_of(location, trace), blame_of(location, trace)
    born = born_at(location.origin, trace)
    return Observation(phase=location.phase, origin=origin, chain=tuple(chain), facts=facts, born=born, blame=blame)


def born_at(origin: Element, trace: Trace) -> str:
    """Return where the infinity was made that an origin makes NaN of, in words, "" where its own line says so, or that is not known."""
    found = birth_of(origin, trace)
    return "" if found is None else f"{operand_name(origin, found[0])} {found[1]}"


def _without_what_stays(chain: Sequence[Crossing]) -> list[Crossing]:
    """Leave out where an element stays what it is, and where it is, while other parts of its tensor are written: a buffer that a rollout is
    gathered in goes through that once for each further row."""
    left, seen, line = list[Crossing](), set[str](), None
    for step in chain:
        if (step.file, step.line) != line:
            seen, line = set(), (step.file, step.line)
        words = _link_words(step)
        if words not in seen or step.backward or step.op not in CARRYING | WRITES:
            left.append(step)
        seen.add(words)
    return left


def _in_batch(origin: Element, trace: Trace) -> tuple[int, ...] | None:
    """The row and the token of an element, as its tensor lies, or what that is a piece of; a module may make anything."""
    made, value = None if origin.call is None else trace.program.calls[origin.call], origin.value_id
    if made is not None and made.module:
        return None
    if (piece := row_and_token(trace, value, origin.flat)) is not None:
        return piece
    layout, _ = layout_of(trace, value)
    return origin.index[: {Layout.TOKENS: 2, Layout.ROWS: 1}.get(layout, 0)]


def _link_words(step: Crossing) -> str:
    return f"{last_word(step.variable) if step.variable else step.op}{show_index(step.index)}"


def _birth_words(step: Crossing) -> str:
    return f"{_link_words(step)} = {number(step.value)}" + (f", born at line {step.line}" if step.line is not None else "")


def _as_returned(origin: Element, trace: Trace) -> Element:
    """The origin as the code gets it: a linear layer multiplies matrices, and gives its result back in the shape of what it was given."""
    made, readers = trace.program.maker(origin.value_id), trace.program.readers(origin.value_id)
    if made is None or len(readers) != 1 or readers[0].name not in IN_ORDER & SIZED or made.site < 0 or readers[0].site != made.site:
        return origin
    value = readers[0].outs[0]
    if value is None or trace.values[value].numel() != trace.values[origin.value_id].numel():
        return origin
    shape, role = tuple(trace.values[value].shape), origin.role or trace.names.role(value)
    variable = trace.names.name(value) or origin.variable
    return replace(origin, shape=shape, index=unravel(origin.flat, shape), variable=variable, role=role)


def _told(origin: Element, program: Program) -> Origin:
    site = origin.site
    masked_by = next((_drop_words(drop) for drop in origin.drops if drop.how in ("mask", "select")), None)
    if masked_by is None and origin.drops:
        masked_by = _drop_words(origin.drops[-1])
    operands = tuple((operand_name(origin, position), operand.value) for position, operand in enumerate(origin.operands))
    call = program.calls[origin.call] if origin.call is not None else None
    operands += _infinite_setting(origin.value, call, operands)
    headroom = limit = None
    if origin.op in EXPONENTIALS and operands:
        limit = round(exponent_limit(_dtype(origin.dtype)), 2)
        headroom = round((exponent_limit(_dtype(origin.dtype)) - operands[0][1]) / math.log(2), 1)
    elif math.isfinite(origin.value) and origin.value:
        headroom = round(headroom_bits(abs(origin.value), _dtype(origin.dtype)), 1)
    return Origin(
        op=origin.op,
        index=origin.index,
        shape=origin.shape,
        value=origin.value,
        dtype=origin.dtype,
        variable=_called(origin),
        expression=site.expression or None if site else None,
        role=str(origin.role) if origin.role else None,
        masked=origin.masked,
        masked_by=masked_by if origin.masked else None,  # it may be taken out on one way, and count on another
        file=site.file if site else None,
        line=site.line if site else None,
        function=site.function if site else None,
        module=call.module or None if call else None,
        operands=operands,
        source=site.source if site else (),
        headroom=headroom,
        limit=limit,
    )


def _infinite_setting(value: float, call: Call | None, operands: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    """What made finite numbers infinite where it is one that the code gives: nothing has overflowed then."""
    if call is None or not math.isinf(value) or not all(math.isfinite(number) for _, number in operands):
        return ()
    given = (arg for arg in (*call.args, *(arg for _, arg in call.kwargs)) if isinstance(arg, float) and math.isinf(arg))
    return tuple((number(arg), arg) for arg in given)[:1]


def _called(origin: Element) -> str | None:
    """A variable by its last word, a weight by its full name."""
    if origin.variable is None or (origin.leaf is not None and origin.leaf.is_of_model):
        return origin.variable
    return last_word(origin.variable)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, torch.float32)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32


_OPERANDS = {  # no source names these
    "addcdiv": ("weight", "numerator", "denominator"),
    "addcmul": ("summand", "factor", "factor"),
    "addmm": ("bias", "input", "weight"),
    "native_layer_norm": ("input", "weight", "bias"),
}
_NUMBERS = {  # and these it may write as a number
    "pow": ("base", "exponent"),
    "mul": ("factor", "factor"),
    "lerp": ("start", "end", "weight"),
    "xlogy": ("factor", "argument"),
    **dict.fromkeys(SHIFTS, ("term", "term")),
}


def operand_name(origin: Element, position: int) -> str:
    operand = origin.operands[position]
    words = words_for(origin.op, origin.site) if origin.site else ()
    if operand.id != NUMBER and origin.given is not None and origin.op in COMMUTATIVE:
        number = _number_word(origin, words, 1)
        if operand.name in (None, number) and number in words:
            return next((word for word in words if word != number), last_word(number))  # what stands first is the number
    if operand.name:
        name = last_word(operand.name)
        return _as_written(origin, words, position, name) or name
    if operand.id == NUMBER and (math.isnan(operand.value) or (math.isinf(operand.value) and origin.op not in NUMBERED)):
        return _number_word(origin, words, position)
    known = _OPERANDS.get(origin.op, ())
    if position < len(known):
        return known[position]
    if origin.op in COMMUTATIVE and [one.id for one in origin.operands].count(NUMBER) == 1 and len(words) == len(origin.operands) == 2:
        words = _in_order(origin, words)
    usual = dict(enumerate(_NUMBERS[origin.op])).get(position) if origin.op in _NUMBERS else None
    word = words[position] if position < len(words) else usual or f"operand {position + 1}"
    written = operand.id == NUMBER and not word.replace(".", "").isidentifier()  # as a number, or as what calculates one
    return _NUMBERS.get(origin.op, ("dividend", "divisor"))[position] if written else word


_READ = re.compile(r"[^\W\d]\w*(\.\w+|\[[^\[\]]*\])*")  # a variable, of an object, a list or a dictionary


def _as_written(origin: Element, words: tuple[str, ...], position: int, name: str) -> str | None:
    """Return what the line of the origin calls an operand, where the name that was found is another function's, which nobody finds there.

    The dividend of `self.shadow[k] / corr` may be called `v` by the loop that filled it.
    """
    if origin.site is None or len(words) != len(origin.operands) or re.search(rf"\b{re.escape(name)}\b", origin.site.expression):
        return None
    return words[position] if _READ.fullmatch(words[position]) else None


def _in_order(origin: Element, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return what the code calls a tensor and a number as they arrive, nothing where it is not certain: `-coef * kl` comes as kl, −coef."""
    place = 1 - [one.id for one in origin.operands].index(NUMBER)
    tensor = origin.operands[place]
    known = {tensor.name, tensor.made} - {"", None}
    own = [at for at, word in enumerate(words) if word in known or (word.startswith("(") and word[1:-1] in known)]
    if len(own) != 1:
        return ()
    return words if own[0] == place else words[::-1]


_PLAIN = re.compile(r"-?[\w.]+")  # what is calculated nowhere
_NAN = re.compile(r"-?float\(.*\)")  # and what is a number all the same


def _number_word(origin: Element, words: tuple[str, ...], position: int) -> str:
    """What the code calls a number that it gives: it may stand first there and last in the call, or behind a keyword."""
    places: tuple[int, ...] = (position, 1 - position) if origin.op in COMMUTATIVE else (position,)
    assigned = origin.site is not None and origin.site.expression.endswith("]")  # to a part, which torch 2.15 fills
    if origin.op in SETS:
        places = (len(words) - 1,) if origin.op in FILLS and not assigned else ()  # what is assigned is no argument
    elif origin.op in LITERALS:
        places = tuple(range(1, len(words)))  # the first says how large the tensor is
    given = [words[place] for place in places if 0 <= place < len(words)]
    tensors = {operand.name for operand in origin.operands if operand.name}
    apart = [word for word in given if _PLAIN.fullmatch(word) and word not in tensors]
    return apart[0] if len(apart) == 1 and not any(map(_NAN.fullmatch, given)) else "a number"


def _drop_words(drop: Drop) -> str:
    name = drop.name
    words = {
        "mask": f"multiplied by {name or 'a mask'} = 0",
        "select": f"not selected by {name or 'an index'}",
        "padding": "padding, which nothing attends to",
        "clip": f"{name} {CLIPPED}",
        "other": f"{REPLACED}the other side of {name}",
        "clamp": f"{REPLACED}a bound of clamp",
        "replace": f"{REPLACED}{name}",
        "share": f"of no weight in {(name or 'a softmax').lstrip('_')}",
    }[drop.how]
    return TOKENS + words if drop.before else words


def observe_weight(name: str | None, parameter: Tensor, flat: int, group: dict[str, Any]) -> Observation:
    """Return what an update did to a weight. group: of the optimizer, with its settings."""
    eps = group.get("eps")
    small = isinstance(eps, float) and float(torch.tensor(eps, dtype=parameter.dtype)) == 0.0
    operands = () if parameter.grad is None else (("gradient", at(parameter.grad, flat)),)
    origin = _element("addcdiv" if eps is not None else "add", parameter, flat, Role.OPTIMIZER)
    origin = replace(origin, variable=name, operands=operands)
    return Observation(phase=Phase.OPTIMIZER, origin=origin, facts=Facts(eps_underflow=small), outside=True)


def observe_update(
    parameter: Tensor, flat: int, moved: float, operands: tuple[tuple[str, float], ...], group: dict[str, Any], optimizer: str, scale: str
) -> Observation:
    """Return an update that was out of all proportion, and finite. moved: by how much. operands: of the optimizer's state. scale: in
    words, how far it is out of proportion."""
    seen = observe_weight(None, parameter, flat, group)
    origin = replace(seen.origin, value=moved, operands=operands)
    return replace(seen, kind=Kind.SPIKE, origin=origin, optimizer=optimizer, scale=scale)


def observe_made(op: str, result: Tensor, flat: int, site: Site | None, module: str, phase: Phase, name: str | None = None) -> Observation:
    """Return what a call inside the model, or its backward, made. name: of what came in, not of what was made."""
    role = Role.WEIGHTS if phase is Phase.WEIGHTS else Names.inside(site, module, set())
    origin = replace(
        _element(op, result, flat, role, site),
        variable=name or (site.name if site and phase is not Phase.INPUT else None),
        expression=site.expression if site else None,
        module=module,
    )
    return Observation(phase=phase, origin=origin, outside=True)


BACKWARD_OF = "the backward of "  # begins what stands for an expression, where what it gave is a gradient


def observe_returned(op: str, gradient: Tensor, flat: int, site: Site | None, module: str) -> Observation:
    """Return what the backward of a call inside the model gave; what the call itself had made was finite."""
    seen = observe_made(op, gradient, flat, site, module, Phase.BACKWARD)
    return replace(seen, origin=replace(seen.origin, expression=f"{BACKWARD_OF}{seen.origin.expression or op}"))


def observe_gradient(
    op: str, name: str | None, gradient: Tensor, flat: int, site: Site | None, weight: Tensor | None = None
) -> Observation:
    """Return an element of a gradient that `op` was the ruin of. site: where that was. weight: whose gradient this rank holds a part of."""
    origin = _element(op, gradient, flat, Role.GRAD, site, weight)
    origin = replace(origin, variable=name, operands=(("gradient", origin.value),))
    return Observation(phase=Phase.BACKWARD, origin=origin, outside=True)


def _element(op: str, tensor: Tensor, flat: int, role: Role, site: Site | None = None, spread: Tensor | None = None) -> Origin:
    """An element that only a watcher saw, in the part of its tensor that is here; its index is that in the whole. spread: over the ranks
    as the tensor is, if not the tensor itself."""
    part = local(tensor)
    here = tensor if part is None else part
    index = unravel(flat, here.shape)
    place = whole(tensor if spread is None else spread, index)
    return Origin(
        op=op,
        index=index if place is None else place[0],
        shape=tuple(here.shape) if place is None else place[1],
        value=at(here, flat),
        dtype=dtype_name(here.dtype),
        role=str(role),
        file=site.file if site else None,
        line=site.line if site else None,
        function=site.function if site else None,
        source=site.source if site else (),
        sharded=place is not None,
    )

"""What in the code keeps a hazard from being one: a clamp, a where, an epsilon, a mask before the operator.

    log_ratio.clamp(-20.0, 20.0)   loss.py:5
    without it torch.exp(log_ratio) in line 6 dies: log_probs[0, 0] rises by 200 nats

It is asked by taking it away: the step is run without it, with a trigger that does no harm as the code stands. Only what dies then is
called a guard, so an epsilon that protects nothing is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.foresight.aims import operand
from nanscope.foresight.hazard import Safeguard
from nanscope.foresight.pushes import Push, Severity
from nanscope.locate.location import locate
from nanscope.locate.origin import Element
from nanscope.locate.trace import Trace
from nanscope.program.by_rows import execute_ends
from nanscope.program.calls import Call, Site, substitute
from nanscope.program.numbers import is_binary, is_finite
from nanscope.program.ops import ADDITIONS, CHOICES, CLAMPS, EXTREMA, OVERLOADED_EXTREMA, PRODUCTS, REPLACEMENTS
from nanscope.program.program import Program
from nanscope.program.run import Run

MOST = 16  # that are asked, those nearest to the loss
TRIED = 32  # pushes that one is asked with
EPSILON = 0.1  # a number that is added to keep something from 0 is not larger
AS_IT_IS = "on the step as it is"


def guards(trace: Trace, survived: Sequence[Push]) -> tuple[Safeguard, ...]:
    """Return what keeps a healthy step healthy. survived: what was done to it, and does no harm."""
    pushes = [push for push in survived if push.severity is not Severity.THEORY]
    found: dict[tuple[str, int, str], Safeguard] = {}
    for calls, payload in list(_candidates(trace))[:MOST]:
        call = trace.program.calls[calls[0]]
        site = trace.program.site_of(call)
        key = (site.file, site.line, site.expression) if site is not None else ("", calls[0], call.name)
        guard = None if key in found else _asked(trace, calls, payload, pushes)
        if guard is not None:
            found[key] = guard
    return tuple(sorted(found.values(), key=lambda guard: (guard.file, guard.line)))


def _candidates(trace: Trace) -> Iterator[tuple[list[int], int]]:
    """Yield what may be one, nearest to the loss first: the calls of one expression, and which of their arguments would stand alone."""
    program, seen = trace.program, set()
    for index, call in reversed(list(enumerate(program.calls))):
        for position in _payloads(trace, call):
            alike = [i for i, other in enumerate(program.calls) if i == index or (other.op == call.op and other.site == call.site >= 0)]
            if (alike[0], position) not in seen:
                seen.add((alike[0], position))
                yield alike, position


def _payloads(trace: Trace, call: Call) -> Iterator[int]:
    """Positions of the arguments whose elements a call lets pass, if it is one that may hold something back."""
    made = next((out for out in call.outs if out is not None), -1)
    result = trace.values.get(made)
    if result is None or len([out for out in call.outs if out is not None]) != 1 or not result.is_floating_point():
        return
    positions: Sequence[int] = ()
    if call.name in CLAMPS | REPLACEMENTS | {"masked_fill"}:
        positions = (0,)
    elif call.name in CHOICES:
        positions = (1, 2)
    elif call.name in EXTREMA | OVERLOADED_EXTREMA and operand(call, 1) is not None:
        positions = (0, 1)
    elif call.name in ADDITIONS and len(call.args) > 1:
        positions = (0,) if _is_epsilon(call.args[1]) else ()
    elif call.name in PRODUCTS and len(call.args) > 1:
        positions = tuple(own for own, other in ((0, 1), (1, 0)) if _is_mask(trace, call, other))
    for position in positions:
        value = operand(call, position)
        if value is not None and trace.values[value].shape == result.shape and trace.values[value].dtype is result.dtype:
            yield position


def _is_epsilon(arg: object) -> bool:
    return isinstance(arg, (int, float)) and 0 < abs(arg) <= EPSILON


def _is_mask(trace: Trace, call: Call, position: int) -> bool:
    value = operand(call, position)
    content = None if value is None else trace.values[value]
    return content is not None and content.numel() > 1 and not content.is_complex() and is_binary(content)


def _asked(trace: Trace, calls: Sequence[int], position: int, pushes: Iterable[Push]) -> Safeguard | None:
    """Take it away, and try what did no harm; None if none of that does any then."""
    bare = _without(trace.program, calls, position)
    guarded = trace.program.calls[calls[0]]
    behind = _behind(trace.program, operand(guarded, position) or 0)
    for push in [None, *_few(push for push in pushes if push.aim.leaf.id in behind)]:
        tensors = dict(trace.tensors)
        if push is not None:
            tensors[push.aim.leaf.id] = push.done(trace.values)
        try:
            run = execute_ends(bare, tensors)
            location = locate(Trace.of(bare, tensors)) if _is_bad(bare, run) else None
        except NanscopeError:
            continue
        if location is not None:
            trigger, severity = (AS_IT_IS, Severity.REACHABLE) if push is None else (push.words, push.severity)
            return _guard(guarded, trace.program.site_of(guarded), location.origin, trigger, severity)
    return None


def _guard(call: Call, site: Site | None, origin: Element, trigger: str, severity: Severity) -> Safeguard:
    file, line, expression = (site.file, site.line, site.expression) if site is not None else ("", 0, "")
    edge = (origin.site.expression, origin.site.line) if origin.site is not None else ("", 0)
    stops = origin.op if origin.born else ""
    return Safeguard(call.name, _flat(expression or call.name), file, line, stops, _flat(edge[0] or origin.op), edge[1], trigger, severity)


def _flat(expression: str) -> str:
    return " ".join(expression.split())


def _without(program: Program, calls: Sequence[int], position: int) -> Program:
    """The program in which an argument stands in the place of the results of some calls."""
    stands: dict[int, int] = {}
    kept: list[Call] = []
    for index, call in enumerate(program.calls):
        args = tuple(substitute(arg, stands) for arg in call.args)
        call = replace(call, args=args, kwargs=tuple((key, substitute(arg, stands)) for key, arg in call.kwargs))
        value = operand(call, position) if index in calls else None
        if value is None:
            kept.append(call)
        else:
            stands.update((out, value) for out in call.outs if out is not None)
    return replace(program, calls=tuple(kept), output=stands.get(program.output, program.output)).slice()


def _behind(program: Program, value: int) -> set[int]:
    """What a value was computed from, itself included."""
    found, waiting = {value}, [value]
    while waiting:
        call = program.maker(waiting.pop())
        new = [source for source in call.inputs() if source not in found] if call is not None else []
        found.update(new)
        waiting += new
    return found


def _few(pushes: Iterable[Push]) -> list[Push]:
    """Of all that is done alike to as many elements of one tensor the strongest; of each kind and tensor one after another."""
    strongest: dict[tuple[object, ...], Push] = {}
    for push in sorted(pushes, key=lambda push: -abs(push.strength)):
        sign = push.strength > 0 if push.kind == "shift" else push.strength
        strongest.setdefault((push.aim.leaf.id, push.aim.masked, len(push.aim.flat), push.kind, sign, push.severity), push)
    kinds: dict[tuple[object, ...], list[Push]] = {}
    for push in strongest.values():
        kinds.setdefault((push.severity, not math.isfinite(push.strength), push.kind, push.aim.masked, push.aim.leaf.id), []).append(push)
    turns = itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds, key=str)))
    few = [push for turn in turns for push in turn if push is not None][:TRIED]
    return sorted(few, key=lambda push: (push.severity, not math.isfinite(push.strength)))


def _is_bad(program: Program, run: Run) -> bool:
    grads: list[Tensor] = [run.grads[leaf.id] for leaf in program.leaves if leaf.diff and leaf.id in run.grads]
    return not bool(is_finite(run.values[program.output])) or not all(bool(is_finite(grad)) for grad in grads)

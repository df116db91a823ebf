"""One sentence for a finding, with the numbers of this step."""

from __future__ import annotations

import math
from pathlib import Path

from nanscope.causes import CAUSES, Cause
from nanscope.locate.observe import CLIPPED
from nanscope.locate.origin import Location
from nanscope.program.ops import TOO_MANY_TO_NAME
from nanscope.roles import last_word
from nanscope.snapshot.observation import Kind, Observation, Origin, Phase
from nanscope.snapshot.step import Snapshot
from nanscope.text import number, show_index


def headline(snapshot: Snapshot, phase: str) -> str:
    r = snapshot.reached
    parts = []
    if r.loss is not None:
        parts.append(f"loss {number(r.loss)}" + (" (finite)" if math.isfinite(r.loss) else ""))
    if r.bad_gradients is not None and r.gradients:
        parts.append(f"{r.bad_gradients} of {r.gradients} gradients non-finite" if r.bad_gradients else "gradients clean")
    if r.bad_weights is not None:
        parts.append(f"{r.bad_weights} of {r.weights} weights non-finite" if r.bad_weights else "weights clean")
    parts.append(
        {"taken": "optimizer stepped", "skipped": "optimizer step skipped", "stopped": "run stopped before the optimizer step"}.get(
            r.stepped, ""
        )
    )
    return f"step {snapshot.step} · rank {snapshot.rank} · {phase}   " + " · ".join(part for part in parts if part)


_BORN: dict[str, str] = {"+inf": "overflowed to +inf", "−inf": "gave −inf", "NaN": "gave NaN"}


def sentence(snapshot: Snapshot, seen: Observation, cause: Cause) -> str:
    p, r = seen.origin, snapshot.reached
    where = f"{Path(p.file).name}:{p.line}" if p.file and p.line else "an unknown line"
    token = "an element" if len(p.shape) != 2 else "a token"
    inside = ""
    if p.masked and p.masked_by and p.masked_by.endswith(CLIPPED):
        inside = f" at {token} where {p.masked_by}"
    elif p.masked:
        inside = f" at {token} that the loss does not count ({p.masked_by})" if p.masked_by else f" at {token} outside the loss"
    index = f"{show_index(p.index)} of {show_index(p.shape)}" if p.shape else ""
    extent = f" ({seen.facts.extent})" if seen.facts.extent and not seen.facts.unwritten else ""
    if seen.kind is Kind.ARRIVED:
        name, source = p.variable or "a weight", seen.source.rstrip(".")
        what = f"the gradient of {name} is {number(p.value)} at {index}, while this rank's own backward gives finite numbers"
        what += f": it came by all-reduce. {source}" if source else ": it came by all-reduce"
    elif seen.phase is Phase.INPUT:
        what = f"{p.variable or 'a tensor of the batch'} came in as {number(p.value)} at {index}{extent}{inside}, read at {where}"
    elif seen.phase is Phase.WEIGHTS:
        name = f"the weight {p.variable}" if p.variable and p.variable != "weight" else "a weight"
        if cause is Cause.HW_BITFLIP:
            what = f"{name} is {number(p.value)} at {index}, many orders of magnitude beyond every other element of it"
        elif seen.poisoned_at is not None:
            what = f"{name} was already {number(p.value)} at {index}: the update of step {seen.poisoned_at} wrote it there"
        else:
            what = f"{name} was already {number(p.value)} at {index} before the step"
    elif seen.phase is Phase.OPTIMIZER and p.operands and p.op != "unknown" and seen.weight:
        head, numbers = _made(p)
        at = f" at {index}" if index else ""
        what = f"the update of {seen.optimizer} made {seen.weight} non-finite: {head}{at}, {where}: {numbers}"
    elif seen.phase is Phase.OPTIMIZER:
        what = f"the update of {seen.optimizer or 'the optimizer'} made {p.variable or 'a weight'} {number(p.value)} at {index}"
    elif p.op in ("unknown", "module"):
        what = f"{p.variable or 'a value'} came out of the model as {number(p.value)} {('at ' + index) if index else ''}".rstrip()
    else:
        head, numbers = _made(p, seen.suspect)
        what = f"{head}{(' at ' + index) if index else ''}{inside}, {where}: {numbers}"
    why = CAUSES[cause].title if cause is not Cause.UNKNOWN else ""
    end = _end(r.loss, r.bad_gradients, r.gradients, r.bad_weights, r.stepped)
    if seen.kind is Kind.CLIP and not r.bad_gradients:
        end = "The clip made every gradient exactly 0: nothing is non-finite any more, and the step is lost"
    if seen.kind is Kind.SWALLOWED:
        end = f"The kernel drops it: the loss stays finite ({number(r.loss)}), and the step learnt from the wrong ratio"
    elif seen.suspect:
        end = f"Everything is finite, but the loss is {number(r.loss)} and the step is {seen.scale or 'out of scale'}"
    return ". ".join(part for part in (what, why[:1].upper() + why[1:], end) if part) + "."


def _made(p: Origin, suspect: bool = False) -> tuple[str, str]:
    """What was made, in words, and the numbers that it was made from."""
    many = p.op in TOO_MANY_TO_NAME
    args = "…" if many else ", ".join(number(value) for _, value in p.operands[:2])
    result = number(p.value)
    subject = f"{p.variable} = {p.expression}" if p.variable and p.expression else (p.expression or p.variable or p.op)
    if math.isfinite(p.value):
        head = f"{subject} became {result}" if suspect else f"the gradient of {subject} is not finite"
        return head, f"{p.op}({args}) = {result}"
    numbers = f"{p.op}({args}) = {result}"
    if p.limit is not None and math.isinf(p.value):
        numbers += f", {p.dtype} ends at exp({p.limit})"
    return f"{subject} {_BORN.get(result, 'gave ' + result)}", numbers


def _end(loss: float | None, bad: int | None, total: int | None, weights: int | None, stepped: str) -> str:
    parts = []
    if loss is not None:
        parts.append(f"the loss is {number(loss)}" if not math.isfinite(loss) else f"the loss stays finite ({number(loss)})")
    if bad is not None and total:
        clean = not bad
        if clean and not weights:
            parts.append("weights and gradients stayed clean")
        elif bad:
            parts.append(_of(bad, total, "gradient"))
    if weights:
        parts.append(f"the update wrote it into {weights} weight{'' if weights == 1 else 's'}")
    if stepped == "skipped":
        parts.append("the optimizer step was skipped and the weights stayed clean")
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def _of(bad: int, total: int, what: str) -> str:
    if total == 1:
        return f"its {what} is non-finite"
    return f"all {total} {what}s are non-finite" if bad == total else f"{bad} of {total} {what}s are non-finite"


def absorbed(location: Location, step: int) -> str:
    """Return what is worth saying of a value that overflowed and did no harm."""
    o = location.origin
    site = o.site
    where = f"{Path(site.file).name}:{site.line}" if site else "an unknown line"
    name = o.variable or (site.expression if site else o.op) or o.op
    outside = " at a position that the loss does not count" if o.masked else ""
    return (
        f"{last_word(name) if o.variable else name} was {number(o.value)} at {show_index(o.index)}{outside} ({where}, step {step}), "
        "and it was absorbed: loss is finite, weights and gradients stayed clean"
    )

"""Where the infinity was made that an operation makes NaN of: it does no harm until it meets a 0, or another infinity.

logits[..., banned] = float("-inf")           here
logps = logits.log_softmax(-1).gather(…)
loss = (logps * mask).sum()                    −inf · 0 = NaN
"""

from __future__ import annotations

import math

from nanscope.locate.forward import bad_sources
from nanscope.locate.origin import NUMBER, Element
from nanscope.locate.trace import Trace
from nanscope.text import line_in, number, ravel

LONGEST = 60  # characters of the code there


def birth_of(origin: Element, trace: Trace) -> tuple[int, str] | None:
    """Return which operand of an origin that is NaN is infinite, and where it was made, in words; None where the origin's own line says so,
    or that is not known."""
    infinite = next((n for n, one in enumerate(origin.operands) if math.isinf(one.value) and one.id != NUMBER), None)
    if infinite is None or not math.isnan(origin.value):
        return None
    operand = origin.operands[infinite]
    value, flat = operand.id, ravel(operand.index, trace.values[operand.id].shape)
    made = None
    while (call := trace.program.maker(value)) is not None:
        made = trace.program.site_of(call) or made
        read = bad_sources(trace, call, value, flat)
        if not read:
            break
        value, flat = read[0]
    own = origin.site
    if call is None and made is not None:
        leaf = next((leaf for leaf in trace.program.leaves if leaf.id == value), None)
        gave = f"what {leaf.made_by} gave" if leaf is not None and leaf.origin == "module" and leaf.made_by else ""
        return (infinite, f"comes of {gave}, read at {line_in(made.file, made.line)}") if gave else None
    if call is None or made is None or (own is not None and (made.file, made.line) == (own.file, own.line)):
        return None
    code = made.expression if len(made.expression) <= LONGEST else f"{made.expression[: LONGEST - 1].rstrip()}…"
    return infinite, f"is {number(operand.value)} since {line_in(made.file, made.line)}: {code}"

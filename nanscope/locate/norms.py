"""What a norm, a variance or a deviation is of: the value that it rescales.

x / x.norm()                                     a norm of x
(x - mean) * torch.rsqrt(square_mean - mean²)    the variance of x
"""

from __future__ import annotations

from nanscope.locate.called import Called
from nanscope.locate.uses import FAR
from nanscope.program.calls import Call
from nanscope.program.ops import (
    DIFFERENCES,
    EXPONENTIALS,
    LOGARITHMS,
    PRODUCTS,
    RESCALINGS,
    SIZES,
    SUMS,
    TO_A_SCALE,
    Flow,
    carries,
    flow_of,
)

_FURTHEST = 60  # calls back from a statistic to what it is of


class Norms:
    """Which values of a program are measures of another one's size."""

    def __init__(self, called: Called) -> None:
        self.program, self.called = called.program, called

    def of(self, value: int) -> tuple[int, int] | None:
        """Return what a value is a norm or a spread of, and what that becomes when it is rescaled; None if it is none."""
        behind = self._behind(value)
        waiting, seen = [(value, False)], {value}
        for _ in range(FAR):
            if not waiting:
                return None
            current, sized = waiting.pop(0)
            for reader in self.program.readers(current):
                out = reader.outs[0] if reader.outs else None
                others = [read for read in reader.inputs() if read != current]
                if out is None or out in seen or len(others) > 1:
                    continue
                masked = bool(others) and self.called.says_mask(others[0])
                if others and not masked and reader.name in RESCALINGS:
                    sources = (read for read in self._sources(others[0]) if read in behind and (sized or behind[read]))
                    source = next((read for read in sources if not self.called.says_mask(read)), None)
                    if source is not None:
                        return source, out
                if carries(reader.op) or (reader.name in TO_A_SCALE and (masked or behind.keys().isdisjoint(others))):
                    seen.add(out)
                    waiting.append((out, sized or self._is_of_size(reader)))
        return None

    def _behind(self, value: int) -> dict[int, bool]:
        """What a value is made of, each with whether a size was taken on the way."""
        stack, found = [(value, False)], dict[int, bool]()
        while stack and len(found) < _FURTHEST:
            current, sized = stack.pop(0)
            call = self.program.maker(current)
            if call is None or call.name in EXPONENTIALS | LOGARITHMS:
                continue
            sized = sized or self._is_of_size(call)
            fresh = [read for read in call.inputs() if not found.get(read, False) and (sized or read not in found)]
            found |= dict.fromkeys(fresh, sized)
            stack += [(read, sized) for read in fresh]
        return found

    @staticmethod
    def _is_of_size(call: Call) -> bool:
        inputs = list(call.inputs())
        return call.name in SIZES or (call.name == "mul" and len(inputs) == 2 and inputs[0] == inputs[1])

    def _sources(self, value: int) -> list[int]:
        """What is rescaled: the value itself, what a mean was taken from, and the factors of a product of two rows."""
        found = [value]
        for _ in range(FAR):
            call = self.program.maker(value)
            if call is None or not (carries(call.op) or call.name in DIFFERENCES | SUMS):
                return found if call is None or not self._is_product(call) else [*found, *call.inputs()]
            value = next(call.inputs(), value)
            found.append(value)
        return found

    @staticmethod
    def _is_product(call: Call) -> bool:
        return call.name in PRODUCTS or flow_of(call.op) is Flow.MATMUL

"""What a loss does with a tensor tells what it is, whatever it is called.

exp(x - y) with a gradient through x     x: the policy's log-probs, y: the old policy's
exp(y - x) - (y - x) - 1                 y: the reference's
y - y.mean(…)                            y: rewards
y * exp(…)                               y: advantages
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from nanscope.program.calls import Call, refs
from nanscope.program.ops import (
    BEFORE_RAISED,
    CHOICES,
    CLAMPS,
    DIFFERENCES,
    HISTORY_ENDS,
    MEANS,
    NATURAL_EXPONENTIALS,
    PAYLOAD,
    PRODUCTS,
    SHIFTS,
    carries,
)
from nanscope.program.program import Program
from nanscope.roles import Role

FAR = 8  # calls from a tensor to what is made of it


class Uses:
    """What a program does with its values, as far as it tells what they mean."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def _carried(self) -> frozenset[int]:
        """The values that a gradient flows through."""
        found = {leaf.id for leaf in self.program.leaves if leaf.diff}
        for call in self.program.calls:
            if call.grad and call.name not in HISTORY_ENDS and not found.isdisjoint(call.inputs()):
                found.update(out for out in call.outs if out is not None)
        return frozenset(found)

    def role(self, value: int) -> Role | None:
        """Return what is done with a value says that it is, None if nothing does."""
        for same in self._moved(value):
            for call in self.program.readers(same):
                found = self._difference(call, same) or self._score(call, same) or self._weight(call, same)
                if found is not None:
                    return found
        return None

    def _moved(self, value: int) -> Iterator[int]:
        """A value and its copies in other places."""
        waiting = [value]
        for _ in range(FAR):
            if not waiting:
                return
            current = waiting.pop(0)
            yield current
            readers = [
                call for call in self.program.readers(current) if carries(call.op) and call.name not in CHOICES and _holds(call, current)
            ]
            waiting += [out for call in readers for out in call.outs if out is not None]

    def _difference(self, call: Call, value: int) -> Role | None:
        """Of two log-probs of which e to the difference is taken: the one that carries the gradient is the policy's."""
        inputs = list(call.inputs())
        if call.name not in DIFFERENCES or len(inputs) != 2 or inputs[0] == inputs[1]:
            return None
        (other,) = [read for read in inputs if read != value] or inputs[:1]
        own = value in self._carried
        if own == (other in self._carried) or call.outs[0] is None:
            return None
        raised = self._raised(call.outs[0])
        if raised is None:
            return None
        if own:
            return Role.LOG_PROBS
        return Role.REF_LOG_PROBS if self.less_its_operand(raised) else Role.OLD_LOG_PROBS

    def _raised(self, value: int) -> Call | None:
        """The call that raises e to a difference, which may be clamped, weighed and summed before."""
        waiting = [value]
        for _ in range(FAR):
            if not waiting:
                return None
            for call in self.program.readers(waiting.pop(0)):
                if call.name in NATURAL_EXPONENTIALS:
                    return call
                if carries(call.op) or call.name in BEFORE_RAISED:
                    waiting += [out for out in call.outs if out is not None]
        return None

    def less_its_operand(self, call: Call) -> bool:
        """Is x subtracted from exp x, as in exp(x) − x − 1?"""
        operand, value = next(call.inputs(), None), call.outs[0]
        for _ in range(3):
            differences = [reader for reader in self.program.readers(value) if reader.name in SHIFTS] if value is not None else []
            if any(operand in set(reader.inputs()) for reader in differences):
                return True
            if not differences:
                return False
            value = differences[0].outs[0]
        return False

    def _score(self, call: Call, value: int) -> Role | None:
        """Data whose own mean is taken from it are rewards."""
        if call.name not in DIFFERENCES or value in self._carried:
            return None
        for other in call.inputs():
            made = self.program.maker_behind(other)
            if other != value and made is not None and made.name in MEANS and value in set(made.inputs()):
                return Role.REWARDS
        return None

    def _weight(self, call: Call, value: int) -> Role | None:
        """Data that weigh a ratio which carries the gradient are advantages."""
        others = [read for read in call.inputs() if read != value]
        if call.name not in PRODUCTS or value in self._carried or len(others) != 1 or others[0] not in self._carried:
            return None
        made = self.program.maker_behind(others[0], CLAMPS | {"neg"})
        return Role.ADVANTAGES if made is not None and made.name in NATURAL_EXPONENTIALS else None


def _holds(call: Call, value: int) -> bool:
    """Are the elements of a value moved, and not what says where from?"""
    return any(value in refs(arg) for position, arg in enumerate(call.args) if position in PAYLOAD.get(call.name, (0,)))

"""What a loss does with a tensor tells what it is, whatever it is called.

exp(x - y) with a gradient through x     x: the policy's log-probs, y: the old policy's
exp(y - x) - (y - x) - 1                 y: the reference's
y - y.mean(…)                            y: rewards
y * exp(…)                               y: advantages
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import cached_property

from nanscope.program.calls import Call, Computes, refs
from nanscope.program.ops import (
    ADDITIONS,
    BEFORE_RAISED,
    BOTH_MOMENTS,
    CHOICES,
    CLAMPS,
    COMPARED,
    COPIES,
    DIFFERENCES,
    DISTANCES,
    HISTORY_ENDS,
    LOG_SOFTMAXES,
    LOGISTIC,
    MEANS,
    NATURAL_EXPONENTIALS,
    NATURAL_LOGARITHMS,
    OF_PROBABILITIES,
    PAYLOAD,
    PROBABILITIES,
    PRODUCTS,
    QUOTIENTS,
    RANKINGS,
    REGRESSIONS,
    RESCALINGS,
    SELECTORS,
    SEQUENCE_SUMS,
    SHIFTS,
    SIGMOIDS,
    SOFTMAXES,
    SUMS,
    TOKEN_SUMS,
    Flow,
    carries,
    flow_of,
)
from nanscope.program.program import Program
from nanscope.roles import Role

FAR = 8  # calls from a tensor to what is made of it
MANY = 40  # calls that are asked on the way to a logarithm


class Uses:
    """What a program does with its values, as far as it tells what they mean."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def _carried(self) -> frozenset[int]:
        """The values that a gradient flows through."""
        found = {leaf.id for leaf in self.program.leaves if leaf.diff}
        for call in self.program.calls:
            read = found.intersection(call.inputs()) if call.grad and call.name not in HISTORY_ENDS | SELECTORS else ()
            if any(flow_of(call.op) is not Flow.MOVE or _holds(call, value) for value in read):
                found.update(out for out in call.outs[: 1 if call.name in RANKINGS else None] if out is not None)
        return frozenset(found)

    def carried(self, value: int) -> bool:
        """Does a gradient flow through a value?"""
        return value in self._carried

    def is_probability(self, value: int) -> bool:
        """Is it made by a softmax, a sigmoid, or e to a log-prob by a softmax; clamped, shifted by an epsilon, averaged as it may be?"""
        call = self.program.maker_behind(value, OF_PROBABILITIES)
        if call is not None and call.name in NATURAL_EXPONENTIALS:
            call = self.program.maker_behind(next(call.inputs()), {"neg"})
            return call is not None and call.name in LOG_SOFTMAXES
        return call is not None and (call.name in PROBABILITIES or self._numerator(call) is not None)

    def softmax_of(self, value: int) -> int | None:
        """What it is the softmax of, by one call or as e to it divided by the sum of that; None if it is none."""
        call = self.program.maker_behind(value)
        if call is not None and call.name in SOFTMAXES:
            return self.root(next(call.inputs()))
        raised = None if call is None else self._numerator(call)
        if raised is None:
            return None
        operand = self.root(next(raised.inputs()))
        shift = self.program.maker(operand)
        return operand if shift is None or shift.name not in DIFFERENCES else self.root(next(shift.inputs()))

    def _numerator(self, call: Call) -> Call | None:
        """Of a quotient of e to something and the sum of that, the call which raises it."""
        inputs = list(call.inputs())
        if call.name not in QUOTIENTS or len(inputs) != 2:
            return None
        raised, total = self.program.maker_behind(inputs[0]), self.program.maker_behind(inputs[1], CLAMPS | {"add"})
        if raised is None or raised.name not in NATURAL_EXPONENTIALS or total is None or total.name not in SUMS:
            return None
        return raised if self.program.maker_behind(next(total.inputs())) is raised else None

    def is_shared_out(self, value: int) -> bool:
        """Is it divided by its own sum, or the logarithm of that taken, as a softmax written out does?"""
        moved = list(self._moved(value))
        for total in (reader for same in moved for reader in self.program.readers(same) if reader.name in SUMS):
            for same in self._moved(total.outs[0] if total.outs[0] is not None else -1, CLAMPS | {"add"}):
                for reader in self.program.readers(same):
                    if reader.name in NATURAL_LOGARITHMS or (reader.name in QUOTIENTS and next(reader.inputs()) in moved):
                        return True
        return False

    def is_logged(self, value: int) -> bool:
        """Is its logarithm taken, within bounds as it may be?"""
        return any(reader.name in NATURAL_LOGARITHMS for same in self._moved(value, CLAMPS) for reader in self.program.readers(same))

    def is_logged_in_the_end(self, value: int) -> bool:
        """Is the logarithm taken of a sum or a share that it is a part of? Then e was raised only to add up, and weighs nothing."""
        waiting, seen = [value], {value}
        for _ in range(MANY):
            if not waiting:
                return False
            for call in self.program.readers(waiting.pop(0)):
                if call.name in NATURAL_LOGARITHMS:
                    return True
                if carries(call.op) or call.name in TOKEN_SUMS | SHIFTS | QUOTIENTS | CLAMPS:
                    new = {out for out in call.outs if out is not None} - seen
                    seen |= new
                    waiting += new
        return False

    def becomes_probability(self, value: int) -> bool:
        """Is e raised to it, or to a sum of it?"""
        return self._raised(value) is not None

    def is_choice(self, value: int) -> bool:
        """Is it a probability of one among many? What a sigmoid makes says yes or no, and its logarithm is a loss."""
        call = self.program.maker_behind(value, OF_PROBABILITIES)
        return self.is_probability(value) and call is not None and call.name not in SIGMOIDS

    def is_log_of(self, value: int, probability: int) -> bool:
        """Is it the logarithm of that probability, or of the same softmax?"""
        log, made = self.program.maker_behind(value, CLAMPS | {"neg"}), self.program.maker_behind(probability)
        if log is None or made is None:
            return False
        if log.name in NATURAL_LOGARITHMS:
            return self.root(next(log.inputs())) == self.root(probability)
        if log.name not in LOG_SOFTMAXES:
            return False
        if made.name in NATURAL_EXPONENTIALS:
            return self.program.maker_behind(next(made.inputs()), {"neg"}) is log
        return made.name in SOFTMAXES and self.root(next(made.inputs())) == self.root(next(log.inputs()))

    def root(self, value: int) -> int:
        """The value behind copies, bounds and an epsilon."""
        call = self.program.maker(value)
        while call is not None and (call.name in COPIES or call.name in CLAMPS or (call.name == "add" and len(list(call.inputs())) == 1)):
            value = next(call.inputs())
            call = self.program.maker(value)
        return value

    def comes_of_probability(self, value: int) -> bool:
        """Is there a softmax behind a value, and nothing but calls of one operand on the way?"""
        call = self.program.maker_behind(value)
        for _ in range(FAR):
            if call is None or call.name in PROBABILITIES | LOG_SOFTMAXES:
                return call is not None
            inputs = list(call.inputs())
            call = self.program.maker_behind(inputs[0]) if len(inputs) == 1 else None
        return False

    def is_compared(self, reader: Call) -> bool:
        """Does a call put two values against each other, to see by how much they differ?"""
        if reader.name in DIFFERENCES and reader.outs[0] is not None and len(set(reader.inputs())) == 2:
            return any(call.name in COMPARED for call in self.program.readers(reader.outs[0]))
        return reader.name in REGRESSIONS

    def is_error(self, value: int) -> bool:
        """Is it by how much two values differ, squared or without its sign, summed up as it may be?"""
        call = self.program.maker_behind(value, SUMS)
        if call is None or call.name not in COMPARED:
            return False
        made = self.program.maker_behind(next(call.inputs()))
        return call.name in REGRESSIONS or (made is not None and self.is_compared(made))

    def taken_for(self, reader: Call, value: int) -> Role | None:
        """What a call that reads a value takes it for: the factors of a product of matrices are activations, what a softmax or a logistic
        loss reads are logits."""
        if reader.name in SOFTMAXES and self.attends(value):
            return Role.ATTENTION
        if reader.name in LOGISTIC:
            return Role.LOGITS if next(reader.inputs(), None) == value else None
        if reader.name == "logsumexp" and self.is_score(value):
            return Role.LOGITS
        if reader.name == "exp" and reader.outs[0] is not None and self.is_shared_out(reader.outs[0]):
            return Role.LOGITS
        return Role.HIDDEN if flow_of(reader.op) is Flow.MATMUL or reader.name in DISTANCES else None

    def is_score(self, value: int) -> bool:
        """Is it a product of matrices, scaled as it may be?"""
        call = self.program.maker_behind(value, RESCALINGS)
        return call is not None and flow_of(call.op) is Flow.MATMUL

    def attends(self, value: int) -> bool:
        """Is it a product of matrices of which the softmax weighs the rows of another one?"""
        if not self.is_score(value):
            return False
        shares = [
            call.outs[0]
            for same in self._moved(value, RESCALINGS | ADDITIONS | CHOICES)
            for call in self.program.readers(same)
            if call.name in SOFTMAXES and call.outs[0] is not None
        ]
        return any(
            flow_of(call.op) is Flow.MATMUL
            for share in shares
            for same in self._moved(share, RESCALINGS)
            for call in self.program.readers(same)
        )

    def role(self, value: int) -> Role | None:
        """Return what is done with a value says that it is, None if nothing does."""
        for same in self._moved(value):
            for call in self.program.readers(same):
                found = self._difference(call, same) or self._score(call, same) or self._weight(call, same)
                if found is not None:
                    return found
        return None

    def _moved(self, value: int, through: Container[str] = ()) -> Iterator[int]:
        """A value and its copies in other places, and what calls of these names make of it."""
        waiting = [value]
        for _ in range(FAR):
            if not waiting:
                return
            current = waiting.pop(0)
            yield current
            readers = [
                call
                for call in self.program.readers(current)
                if call.name in through or (carries(call.op) and call.name not in CHOICES and _holds(call, current))
            ]
            waiting += [out for call in readers for out in call.outs if out is not None]

    def _difference(self, call: Call, value: int) -> Role | None:
        """Of two log-probs of which e to the difference is taken: the one that carries the gradient is the policy's."""
        inputs = list(call.inputs())
        if call.name not in DIFFERENCES or len(inputs) != 2 or inputs[0] == inputs[1]:
            return None
        (other,) = [read for read in inputs if read != value] or inputs[:1]
        own = value in self._carried
        if own == (other in self._carried) or call.outs[0] is None or any(map(self._is_difference, inputs)):
            return None  # what is taken from a log-ratio shifts that
        raised = self._raised(call.outs[0])
        if raised is None:
            return None
        if own:
            return Role.LOG_PROBS
        return Role.REF_LOG_PROBS if self.less_its_operand(raised) else Role.OLD_LOG_PROBS

    def _is_difference(self, value: int) -> bool:
        """Is it what two tensors differ by?"""
        made = self.program.maker_behind(value)
        return made is not None and made.name in DIFFERENCES and len(set(made.inputs())) == 2

    def _raised(self, value: int) -> Call | None:
        """The call that raises e to a difference, which may be clamped, weighed and summed before."""
        waiting = [value]
        for _ in range(FAR):
            if not waiting:
                return None
            for call in self.program.readers(waiting.pop(0)):
                if call.name in NATURAL_EXPONENTIALS:
                    return call
                if carries(call.op) or call.name in BEFORE_RAISED | SEQUENCE_SUMS:
                    waiting += [out for out in call.outs if out is not None]
        return None

    def less_its_operand(self, call: Call) -> bool:
        """Is x subtracted from exp x, as in exp(x) − x − 1? Added to it, it makes no divergence."""
        operand, value = next(call.inputs()), call.outs[0]
        for _ in range(3):
            shifts = [reader for reader in self.program.readers(value) if reader.name in SHIFTS] if value is not None else []
            if any(self._takes_off(reader, operand) for reader in shifts):
                return True
            if not shifts:
                return False
            value = shifts[0].outs[0]
        return False

    def _takes_off(self, shift: Call, operand: int) -> bool:
        """Is it a difference with that, or a sum with its negative?"""
        if shift.name in DIFFERENCES:
            return any(self._alike(read, operand) for read in shift.inputs())
        return any(self._is_negative(read, operand) or self._is_negative(operand, read) for read in shift.inputs())

    def _alike(self, one: int, other: int) -> bool:
        """Are they one value, or made by the same call of the same operands?"""
        made, again = self.program.maker(one), self.program.maker(other)
        return one == other or (made is not None and again is not None and (made.op, made.args) == (again.op, again.args))

    def _is_negative(self, one: int, other: int) -> bool:
        made = self.program.maker(one)
        return made is not None and made.name == "neg" and self._alike(next(made.inputs()), other)

    def _score(self, call: Call, value: int) -> Role | None:
        """Data whose own mean is taken from it are rewards, but for what a model is given, or is to give, and what an optimizer centres."""
        if self.program.computes is Computes.UPDATE:
            return None
        centred = value not in self._carried and self.is_centred(call, value)
        return Role.REWARDS if centred and call.outs[0] is not None and not self._is_of_model(call.outs[0]) else None

    def _is_of_model(self, value: int) -> bool:
        """Do data, scaled as they may be, go into a product of matrices, or are they what carries a gradient is held against?"""
        for same in self._moved(value, RESCALINGS | CLAMPS):
            for reader in self.program.readers(same):
                if flow_of(reader.op) is Flow.MATMUL:
                    return True
                if self.is_compared(reader) and any(other in self._carried for other in reader.inputs() if other != same):
                    return True
        return False

    def is_centred(self, call: Call, value: int) -> bool:
        """Is a value's own mean taken from it?"""
        if call.name not in DIFFERENCES:
            return False
        makers = [self.program.maker_behind(other) for other in call.inputs() if other != value]
        return any(made is not None and self._is_mean(made, value) for made in makers)

    def _is_mean(self, call: Call, value: int) -> bool:
        """Is it the mean of a value, or its sum, of what a mask leaves of it for instance, divided by something?"""
        if call.name in MEANS | BOTH_MOMENTS:
            return value in set(call.inputs())
        summed = self.program.maker_behind(next(call.inputs())) if call.name in QUOTIENTS else None
        if summed is None or summed.name not in SUMS:
            return False
        weighed = self.program.maker_behind(next(summed.inputs()))
        read = {*summed.inputs(), *(weighed.inputs() if weighed is not None and weighed.name in PRODUCTS else ())}
        return value in read

    def _weight(self, call: Call, value: int) -> Role | None:
        """Data that weigh a ratio which carries the gradient are advantages."""
        others = [read for read in call.inputs() if read != value]
        if call.name not in PRODUCTS or value in self._carried or len(others) != 1 or others[0] not in self._carried:
            return None
        made = self.program.maker_behind(others[0], CLAMPS | {"neg"})
        if made is None or made.name not in NATURAL_EXPONENTIALS:
            return None
        operand = next(made.inputs())
        shift, leaf = self.program.maker_behind(operand, BEFORE_RAISED), self.program.leaf(operand)
        told = leaf is not None and not leaf.is_of_model and leaf.origin != "module"  # no rate or deviation, learnt or put out
        return Role.ADVANTAGES if told or (shift is not None and shift.name in SHIFTS) else None


def _holds(call: Call, value: int) -> bool:
    """Are the elements of a value moved, and not what says where from?"""
    return any(value in refs(arg) for position, arg in enumerate(call.args) if position in PAYLOAD.get(call.name, (0,)))

"""Which values of a loss are made of which, as far as tokens go: through moves, clamps, masks, picks and sums.

    lineage = Lineage(trace)
    lineage.ends(Role.LOG_PROBS)               the log-probs that something else is made of
    lineage.back(value, masks=True, deep=True) what they were before the loss clamped, masked, picked or summed them

G: the values that carry a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, refs
from nanscope.program.numbers import is_binary
from nanscope.program.ops import CLAMPS, DIFFERENCES, MASKINGS, MOVES, PICKS, SCALES, SUMS, UP_TO_SIGN
from nanscope.roles import LOG_PROBS, Role

LONGEST_WALK = 60  # calls that a value is followed back

RATES = frozenset((Role.ADVANTAGES, Role.REWARDS))  # what a token is pushed by

_CLAMPS = CLAMPS | {"nan_to_num"}


@dataclass(frozen=True)  # without slots: what is derived is kept
class Lineage:
    """One run, asked for the ways of its values."""

    trace: Trace

    @cached_property
    def carries(self) -> frozenset[int]:
        """G: the values through which the loss has a gradient."""
        program = self.trace.program
        found = {leaf.id for leaf in program.leaves if leaf.diff}
        for call in program.calls:
            if call.grad and call.name != "detach" and any(value in found for value in call.inputs()):
                found.update(out for out in call.outs if out is not None and self.trace.values[out].is_floating_point())
        return frozenset(found)

    @cached_property
    def roles(self) -> dict[int, Role | None]:
        """The role of every value that is more than a bare number."""
        return {value: self.trace.names.role(value) for value, tensor in self.trace.values.items() if tensor.dim() > 0}

    # -- up: what a value was ------------------------------------------------------------------------------------------------------

    def ends(self, role: Role) -> list[int]:
        """Return the values of a role that something else is made of, in the order of the program."""
        found = []
        for value, own in self.roles.items():
            if own is not role or not self.trace.values[value].is_floating_point():
                continue
            readers = self.trace.program.readers(value)
            if any(self.roles.get(out) is not role for call in readers for out in call.outs if out is not None):
                found.append(value)
        return found

    def back(self, value: int, *, masks: bool, deep: bool) -> list[int]:
        """Return the values that a value was before moves and clamps, itself first; with `masks` also before masks, with `deep` before
        tokens were picked out or summed up."""
        chain = [value]
        carried = value in self.carries
        through = MOVES | _CLAMPS | (MASKINGS if masks else frozenset()) | (PICKS | SUMS if deep else frozenset())
        for _ in range(LONGEST_WALK):
            call = self.trace.program.maker(chain[-1])
            source = self._source(call, chain[-1]) if call is not None and call.name in through else None
            if source is None or (source in self.carries) is not carried or self.roles.get(source) not in LOG_PROBS:
                break
            chain.append(source)
        return chain

    def before_sign(self, value: int) -> int:
        """Return the advantages before a minus sign, a change of shape or a mask."""
        for _ in range(LONGEST_WALK):
            call = self.trace.program.maker(value)
            inputs = list(call.inputs()) if call is not None else []
            if call is not None and call.name == "mul":
                inputs = [v for v in inputs if not (self.is_binary(v) and self.roles.get(v) is Role.MASK)]
            elif call is None or call.name not in UP_TO_SIGN:
                break
            if len(inputs) != 1 or self.roles.get(inputs[0]) not in RATES:
                break
            if self.roles.get(value) is Role.ADVANTAGES and self.roles[inputs[0]] is Role.REWARDS:
                break
            value = inputs[0]
        return value

    def factors(self, value: int) -> list[int]:
        """Return a value and the factors that it is a product of, nearest first."""
        found: list[int] = []
        stack = [value]
        while stack and len(found) < LONGEST_WALK:
            current = stack.pop(0)
            found.append(current)
            for call in self.makers([current]):
                if call.name in SCALES:
                    stack += [v for v in call.inputs() if v in self.roles]
        return found

    def makers(self, values: Iterable[int]) -> Iterator[Call]:
        """Yield the calls that make some values."""
        for value in values:
            if (call := self.trace.program.maker(value)) is not None:
                yield call

    def _source(self, call: Call, out: int) -> int | None:
        """The operand that a call only moves, clamps, masks, picks from or sums over the tokens; None if it does something else."""
        inputs = list(call.inputs())
        content, made = self.trace.values, self.trace.values[out]
        if call.name in MASKINGS:
            sources = [v for v in inputs if self.roles.get(v) in LOG_PROBS and content[v].is_floating_point() and not self.is_binary(v)]
            masks = [v for v in inputs if v not in sources and content[v].numel() > 1]
            fits = len(sources) == 1 and len(masks) == 1 and self.is_binary(masks[0])
            return sources[0] if fits and content[sources[0]].shape == made.shape else None
        if not inputs or (call.name == "cat" and len(inputs) != 1):
            return None
        source = content[inputs[0]]
        if call.name in PICKS:
            mask = content[inputs[1]] if len(inputs) == 2 else None
            fits = mask is not None and mask.dtype is torch.bool and mask.shape == source.shape
        elif call.name in SUMS:
            fits = source.dim() == 2 and made.numel() == source.shape[0] and source.shape[1] > 1
        else:
            fits = source.numel() == made.numel()
        return inputs[0] if fits else None

    # -- down: what is made of a value ---------------------------------------------------------------------------------------------

    def forms(self, policy: int) -> tuple[int, ...]:
        """Return the policy log-probs and what moves, clamps, masks, picks and sums make of them, in order."""
        found = [policy]
        for call in self.trace.program.calls:
            if call.name in MOVES | _CLAMPS | MASKINGS | PICKS | SUMS and any(value in found for value in call.inputs()):
                found += [out for out in call.outs if out in self.carries and self._source(call, out) in found]
        return tuple(found)

    def cone(self, policy: int) -> tuple[int, ...]:
        """Return the values that are made of the policy log-probs, those included."""
        found = {policy}
        for call in self.trace.program.calls:
            if any(value in found for value in call.inputs()):
                found.update(out for out in call.outs if out is not None)
        return tuple(found)

    def partners(self, cone: tuple[int, ...], ops: frozenset[str]) -> list[int]:
        """Return what meets the gradient-carrying values of a cone in the given operators, and has no gradient itself."""
        own = set(cone) & self.carries
        found: list[int] = []
        for call in self.trace.program.calls:
            inputs = list(call.inputs())
            if call.name in ops and any(value in own for value in inputs):
                found += [value for value in inputs if value not in self.carries and self.trace.values[value].is_floating_point()]
        return list(dict.fromkeys(value for value in found if self.width(value) > 1 or value in self.roles))

    def selected(self, cone: tuple[int, ...]) -> Iterator[tuple[int, bool]]:
        """Yield (mask, whether it is true for what is kept) of every call that takes elements out of a cone."""
        own = set(cone)
        for call in self.trace.program.calls:
            arms = _ARMS.get(call.name)
            if arms is not None and any(value in own for value in call.inputs()):
                yield from ((mask, keep) for mask, keep in arms(call, own) if mask in self.trace.values)

    def compares_by_kl(self, forms: tuple[int, ...], anchor: int) -> bool:
        """Is the difference of these two an estimate of a KL divergence?"""
        readers = self.trace.program.readers
        differences = [call for call in readers(anchor) if set(forms) & set(call.inputs()) and call.name in DIFFERENCES]
        outs = [call.outs[0] for call in differences if call.outs[0] is not None]
        further = [out for value in outs for call in readers(value) for out in call.outs if out is not None]
        return any(self.roles.get(value) is Role.KL for value in (*outs, *further))

    # -- what stands in a value ----------------------------------------------------------------------------------------------------

    def width(self, value: int) -> int:
        """Return how many elements a value has."""
        return self.trace.values[value].numel()

    def is_binary(self, value: int) -> bool:
        """Is a value all zeros and ones?"""
        content = self.trace.values[value]
        return content.dtype is torch.bool or is_binary(content)

    def is_token_mask(self, value: int, tokens: int) -> bool:
        """Is a value zeros and ones, one for each token, and not an advantage or reward that happens to be?"""
        return self.width(value) == tokens and self.is_binary(value) and self.roles.get(value) not in RATES


def _where(call: Call, own: set[int]) -> list[tuple[int, bool]]:
    condition, kept = list(refs(call.args[0])), [any(value in own for value in refs(arg)) for arg in call.args[1:3]]
    return [(value, kept[0]) for value in condition] if len(kept) == 2 and kept[0] != kept[1] else []


# How a call says which elements it keeps: (mask, true for the kept ones).
_ARMS: dict[str, Callable[[Call, set[int]], list[tuple[int, bool]]]] = {
    "mul": lambda call, own: [(value, True) for value in call.inputs() if value not in own],
    "where": _where,
    "masked_fill": lambda call, own: [(value, False) for value in refs(call.args[1])],
    "index": lambda call, own: [(value, True) for value in refs(call.args[1])],
    "masked_select": lambda call, own: [(value, True) for value in refs(call.args[1])],
}
